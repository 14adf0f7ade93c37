"""Parallel layout: which rank holds which part of the model, and the process groups that follow from it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spark_megatron.architecture import Layout

__all__ = ["Layout", "Parallel"]


class Parallel:
    """This rank's place in the layout and its megatron-core process groups. A collective: every rank makes one."""

    def __init__(self, layout: Layout) -> None:
        from megatron.core import parallel_state as groups
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

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
            if torch.cuda.is_available():
                # Sequence parallelism enters this generator's state even where nothing is drawn from it.
                model_parallel_cuda_manual_seed(0)
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
