"""Where the rows of a table live: pipeline stage, model chunk and expert rank, and the parameters of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from transformers import PreTrainedConfig

from spark_megatron.architecture import Architecture
from spark_megatron.engine.parallel import Layout, Parallel
from spark_megatron.engine.weights.table import FIRST, LAST, Row, Shape, table


@dataclass(frozen=True)
class Home:
    """The ranks and the model chunk that hold a row's parameter, and its name in that chunk."""

    stage: int
    chunk: int
    expert_rank: int | None
    """None: every expert-parallel rank holds it."""
    name: str


def home(row: Row, model: Architecture, layout: Layout) -> Home:
    """Where ``layout`` puts ``row``.

    Interleaved pipelines deal the chunks of consecutive layers out like cards (``get_transformer_layer_offset``).
    """
    if row.place == FIRST:
        return Home(0, 0, None, row.name())
    if row.place == LAST:
        return Home(layout.pipeline - 1, layout.virtual - 1, None, row.name())
    dealt, layer = divmod(int(row.place), model.layers // (layout.pipeline * layout.virtual))
    chunk, stage = divmod(dealt, layout.pipeline)
    if row.expert is None:
        return Home(stage, chunk, None, row.name(layer))
    expert_rank, expert = divmod(row.expert, model.experts // layout.expert)
    return Home(stage, chunk, expert_rank, row.name(layer, expert))


def shard_shapes(model: Architecture, layout: Layout, stage: int, expert_rank: int) -> list[dict[str, Shape]]:
    """Per model chunk the name and shape of every parameter of a rank on this stage and expert-parallel rank.

    Nothing is built and no process group is needed; ranks that differ in tensor, context or data rank hold alike.
    """
    model.check(layout)
    shapes: list[dict[str, Shape]] = [{} for _ in range(layout.virtual)]
    for row in table(model, fused=False):
        at = home(row, model, layout)
        shared = not row.exported and layout.pipeline == 1  # the tied head is the embedding itself
        if at.stage == stage and at.expert_rank in (None, expert_rank) and not shared:
            shapes[at.chunk][at.name] = row.shard_shape(layout.tensor)
    return shapes


class Placement:
    """The rows of a model's table and the parameters of this rank's chunks that they describe.

    Raises:
        RuntimeError: table and chunks do not fit; names the parameter.
    """

    def __init__(self, hf: PreTrainedConfig, chunks: Sequence[torch.nn.Module], parallel: Parallel) -> None:
        self.model, self.parallel = Architecture.of(hf.to_dict()), parallel
        found = [dict(chunk.named_parameters()) for chunk in chunks]
        fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in found[0])
        self.rows = table(self.model, fused=fused)
        self.local: dict[str, Tensor] = {}
        """This rank's parameters by ``Row.mcore``."""
        for row in self.rows:
            at = self.home(row)
            if at.stage == parallel.pipeline_rank and at.expert_rank in (None, parallel.expert_rank):
                parameter = found[at.chunk].pop(at.name, None)
                if parameter is not None:
                    self._adopt(row, parameter)
                elif row.exported:
                    raise RuntimeError(f"the weight table has {row.mcore}, but the model has no such parameter")
        unknown = sorted(name for names in found for name in names)
        if unknown:
            raise RuntimeError(f"the weight table has no row for the parameters {unknown}")

    def _adopt(self, row: Row, parameter: torch.nn.Parameter) -> None:
        expected = row.shard_shape(self.parallel.layout.tensor)
        if tuple(parameter.shape) != expected:
            raise RuntimeError(f"{row.mcore} has shape {tuple(parameter.shape)}, the weight table gives it {expected}")
        # The oldest supported megatron-core marks weights as it initialises them, which these never are; an unmarked
        # slice would count as a duplicate and be left out of the gradient norm. Biases are marked.
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, row.cut, row.dim, len(row.blocks))
        self.local[row.mcore] = parameter

    def home(self, row: Row) -> Home:
        return home(row, self.model, self.parallel.layout)
