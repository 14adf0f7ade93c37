"""Parallel layout: which rank holds which part of the model, and the process groups that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; the data-parallel degree is what is left of the world."""

    tensor: int
    pipeline: int
    world: int

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline)


class Parallel:
    """This rank's place in the layout and its megatron-core process groups."""

    def __init__(self, tensor: int, pipeline: int) -> None:
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor, pipeline)
        present = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if present != (tensor, pipeline):
            raise RuntimeError(f"this process has groups for (tensor, pipeline) = {present}, not {(tensor, pipeline)}")
        self.layout = Layout(tensor, pipeline, dist.get_world_size())
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group()
        self.model_group = parallel_state.get_model_parallel_group()
        self.tensor_rank = self.tensor_group.rank()
        self.pipeline_rank = self.pipeline_group.rank()
        self.data_rank = self.data_group.rank()

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.layout.pipeline - 1

    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage in this rank's pipeline."""
        return dist.get_global_rank(self.pipeline_group, self.layout.pipeline - 1)
