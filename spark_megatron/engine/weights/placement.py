"""The rows of a model's table beside the parameters of this rank that they describe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from transformers import PreTrainedConfig

from spark_megatron.architecture import Architecture
from spark_megatron.engine.parallel import Parallel
from spark_megatron.engine.weights.home import Home, home
from spark_megatron.engine.weights.table import table
from spark_megatron.slices import Row


class Placement:
    """The rows of a model's table and the parameters of this rank's chunks that they describe.

    Raises:
        RuntimeError: table and chunks do not fit; names the parameter.
    """

    def __init__(self, hf: PreTrainedConfig, chunks: Sequence[torch.nn.Module], parallel: Parallel) -> None:
        self.hf, self.model, self.parallel = hf, Architecture.of(hf.to_dict()), parallel
        found = [dict(chunk.named_parameters()) for chunk in chunks]
        fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in found[0])
        self.rows = table(self.model, fused=fused)
        self.local: dict[str, Tensor] = {}
        """This rank's parameters by ``Row.full_name``."""
        for row in self.rows:
            at = self.home(row)
            if at.stage == parallel.pipeline_rank and at.expert_rank in (None, parallel.expert_rank):
                parameter = found[at.chunk].pop(at.name, None)
                if parameter is not None:
                    self._adopt(row, parameter)
                elif row.exported:
                    raise RuntimeError(f"the weight table has {row.full_name}, but the model has no such parameter")
        unknown = sorted(name for names in found for name in names)
        if unknown:
            raise RuntimeError(f"the weight table has no row for the parameters {unknown}")

    def _adopt(self, row: Row, parameter: torch.nn.Parameter) -> None:
        expected = row.shard_shape(self.parallel.layout.tensor)
        if tuple(parameter.shape) != expected:
            raise RuntimeError(
                f"{row.full_name} has shape {tuple(parameter.shape)}, the weight table gives it {expected}"
            )
        # The oldest supported megatron-core marks weights as it initialises them, which these never are; an unmarked
        # slice would count as a duplicate and be left out of the gradient norm. Biases are marked.
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, row.cut, row.dim, len(row.blocks))
        self.local[row.full_name] = parameter

    def home(self, row: Row) -> Home:
        return home(row, self.model, self.parallel.layout)
