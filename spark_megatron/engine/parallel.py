"""Parallel layout: which rank holds which part of the model, and the process groups that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. The data-parallel degree is what is left of the world.

    ``virtual`` is the number of model chunks that each pipeline rank holds (1: no interleaving). ``sequence`` splits
    activations between tensor-parallel regions over the tensor-parallel ranks. Experts are spread over ``expert``
    ranks, which are ranks of the data (and context) parallel dimension for everything else; within an expert the
    tensor-parallel degree is ``tensor`` too.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert", "virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name}={getattr(self, name)} must be at least 1")
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"parallel.virtual={self.virtual} needs pipeline stages, but parallel.pipeline=1: set one of them")
        if self.sequence and self.tensor == 1:
            raise ValueError("parallel.sequence=true needs parallel.tensor of 2 or more: there is nothing to split over")

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the model and its context."""
        return self.tensor * self.pipeline * self.context

    def data(self, world: int) -> int:
        """Data-parallel degree of ``world`` ranks; ValueError where the layout does not fit."""
        if world % self.model:
            raise ValueError(
                f"parallel.tensor={self.tensor} * parallel.pipeline={self.pipeline} * parallel.context={self.context} "
                f"does not divide parallel.ranks={world}: choose degrees whose product does"
            )
        data = world // self.model
        if (data * self.context) % self.expert:
            raise ValueError(
                f"parallel.expert={self.expert} does not divide the {data * self.context} data and context ranks that "
                f"parallel.ranks={world} leaves: choose a degree that does"
            )
        return data


class Parallel:
    """This rank's place in the layout and its megatron-core process groups. A collective: every rank makes one."""

    def __init__(self, layout: Layout) -> None:
        from megatron.core import parallel_state as groups

        self.layout = layout
        self.data = layout.data(dist.get_world_size())
        if not groups.model_parallel_is_initialized():
            groups.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor,
                pipeline_model_parallel_size=layout.pipeline,
                virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
                context_parallel_size=layout.context,
                expert_model_parallel_size=layout.expert,
            )
        present = Layout(
            groups.get_tensor_model_parallel_world_size(),
            groups.get_pipeline_model_parallel_world_size(),
            groups.get_context_parallel_world_size(),
            groups.get_expert_model_parallel_world_size(),
            groups.get_virtual_pipeline_model_parallel_world_size() or 1,
            layout.sequence,
        )
        if present != layout:
            raise RuntimeError(f"this process has process groups for {present}, not for {layout}")
        self.tensor_group = groups.get_tensor_model_parallel_group()
        self.pipeline_group = groups.get_pipeline_model_parallel_group()
        self.context_group = groups.get_context_parallel_group()
        self.data_group = groups.get_data_parallel_group()
        self.data_context_group = groups.get_data_parallel_group(with_context_parallel=True)
        self.model_group = groups.get_model_parallel_group()
        self.expert_group = groups.get_expert_model_parallel_group()
        self.expert_tensor_group = groups.get_expert_tensor_parallel_group()
        self.expert_tensor_model_group = groups.get_expert_tensor_and_model_parallel_group()

    @property
    def tensor_rank(self) -> int:
        return self.tensor_group.rank()

    @property
    def pipeline_rank(self) -> int:
        return self.pipeline_group.rank()

    @property
    def context_rank(self) -> int:
        return self.context_group.rank()

    @property
    def data_rank(self) -> int:
        return self.data_group.rank()

    @property
    def expert_rank(self) -> int:
        return self.expert_group.rank()

    def holds_first(self, chunk: int) -> bool:
        """Whether this rank's ``chunk`` begins the model (has the embedding)."""
        return self.pipeline_rank == 0 and chunk == 0

    def holds_last(self, chunk: int) -> bool:
        """Whether this rank's ``chunk`` ends the model (has the final norm and the head)."""
        return self.last_stage and chunk == self.layout.virtual - 1

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.layout.pipeline - 1

    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage in this rank's pipeline."""
        return dist.get_global_rank(self.pipeline_group, self.layout.pipeline - 1)
