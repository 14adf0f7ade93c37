"""Where the parts of a model live: which pipeline stage, model chunk and expert rank, and which ranks those are.

Plain arithmetic: no process group is needed, so that a layout can be studied without its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_megatron.architecture import Architecture, Layout
from spark_megatron.engine.weights.table import table
from spark_megatron.slices import FIRST, LAST, Row, Shape


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
    ahead = int(model.ends_count(layout))  # the embedding is then counted as a layer, and the head too
    dealt, layer = divmod(int(row.place) + ahead, (model.layers + 2 * ahead) // (layout.pipeline * layout.virtual))
    chunk, stage = divmod(dealt, layout.pipeline)
    if dealt == 0:
        layer -= ahead
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


@dataclass(frozen=True)
class Position:
    """A rank's place in each dimension of a layout."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int


def position(rank: int, layout: Layout, world: int) -> Position:
    """Where megatron-core puts global ``rank`` of ``world`` ranks (``parallel_state.RankGenerator``).

    Tensor ranks are neighbours, then come context, data and pipeline; experts are dealt over neighbouring context and
    data ranks.
    """
    data = layout.data(world)
    rest, tensor = divmod(rank, layout.tensor)
    pipeline, replica = divmod(rest, layout.context * data)
    return Position(tensor, replica % layout.context, replica // layout.context, pipeline, replica % layout.expert)
