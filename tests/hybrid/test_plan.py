"""The plan of a hand-over, carried out element by element on numbered tensors, and what it moves against the bound."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from spark_megatron.architecture import Architecture, Layout
from spark_megatron.engine.weights.home import position
from spark_megatron.engine.weights.table import table
from spark_megatron.hybrid.plan import Sides, plan
from spark_megatron.hybrid.traffic import traffic
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.slices import Row, whole

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 37,
    "tie_word_embeddings": True,
}
SPARSE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
UNTIED = DENSE | {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False}
ENDS = DENSE | {"num_hidden_layers": 6}
MODELS = {"tied": DENSE, "experts": SPARSE, "untied": UNTIED, "ends": ENDS}


def layouts(model: Architecture, world: int) -> list[Layout]:
    """All that fit."""
    found = []
    degrees = (1, 2, 4, 8)
    for tensor in degrees:
        for pipeline in degrees:
            for context in (1, 2):
                for expert in (1, 2, 4):
                    for virtual in (1, 2):
                        try:
                            layout = Layout(tensor, pipeline, context, expert, virtual, tensor > 1)
                            layout.data(world)
                            model.check(layout)
                        except ValueError:
                            continue
                        found.append(layout)
    return found


def cases() -> list[tuple[str, int, Layout, int, int]]:
    """Model, ranks, layout, ranks per sampler, ranks per node: all pairs of 4 ranks, and some of 8."""
    found = []
    for name, config in MODELS.items():
        model = Architecture.of(config)
        for sampler in (1, 2, 4):
            found += [(name, 4, layout, sampler, 4 if sampler == 2 else 2) for layout in layouts(model, 4)]
        more = [(name, 8, layout, sampler, 2) for layout in layouts(model, 8) for sampler in (1, 2, 4, 8)]
        found += random.Random(name).sample(more, 10)
    return found


def numbered(rows: list[Row]) -> dict[str, np.ndarray]:
    """Each HF tensor with a number of its own in each element."""
    tensors, count = {}, 1
    for row in rows:
        for name, shape in zip(row.hf, row.shapes, strict=True):
            size = int(np.prod(shape))
            tensors.setdefault(name, np.arange(count, count + size).reshape(shape))
            count += size
    return tensors


def shard(row: Row, degree: int, rank: int, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """A rank's parameter of a row; padding is 0."""
    found = np.zeros(row.shard_shape(degree), np.int64)
    view = np.moveaxis(found, row.dim, 0)
    for offset, segment in row.segments(degree, rank):
        piece = np.moveaxis(tensors[row.hf[segment.tensor]], row.dim, 0)[segment.start : segment.stop]
        view[offset : offset + len(segment)] = piece
    return found


@pytest.mark.parametrize(("name", "world", "layout", "sampler", "node"), cases(), ids=str)
def test_every_element_arrives_once_and_from_one_who_has_it(
    name: str, world: int, layout: Layout, sampler: int, node: int
) -> None:
    """In bytes that meet the bounds: per rank, and what comes into a node from others."""
    model = Architecture.of(MODELS[name])
    rows = table(model, fused=False)
    sides = Sides(model, layout, rows, sampler, vllm_rows(model), world, node, itemsize=2)
    tensors = numbered(rows)
    limit = 256
    got = [
        {(r.full_name, r.expert): np.zeros(r.shard_shape(sampler), np.int64) for r in sides.wanted}
        for _ in range(world)
    ]
    shipments = list(plan(sides, limit))
    for shipment in shipments:
        row, parcel = shipment.target, shipment.parcel
        holds = sides.stages(shipment.sources[0])
        for source in shipment.sources[1:]:
            holds |= sides.stages(source)
        values: dict[int, np.ndarray] = {}
        for rank in range(world):
            tensor = position(rank, layout, world).tensor
            if holds[rank] and tensor in parcel.held:
                mine = np.moveaxis(shard(shipment.sources[0], layout.tensor, tensor, tensors), row.dim, 0)
                offsets = zip(parcel.held[tensor], parcel.lengths, strict=True)
                values[rank] = np.concatenate([mine[start : start + length] for start, length in offsets])
        first = dict(values)
        assert shipment.bytes == values[next(iter(values))].size * 2
        assert shipment.bytes <= limit or len(parcel) == 1
        assert not set(shipment.receivers) & set(first), "nobody gets what it holds"
        for receiver, sender, later in zip(shipment.receivers, shipment.senders, shipment.later, strict=True):
            assert (sender in first) != later
            assert sender in values or later
            values[int(receiver)] = next(iter(first.values()))
        for rank in (*shipment.receivers.tolist(), *shipment.keepers.tolist()):
            into = np.moveaxis(got[rank][row.full_name, row.expert], row.dim, 0)
            start = 0
            for offset, length in zip(parcel.wanted[rank % sampler], parcel.lengths, strict=True):
                assert not into[offset : offset + length].any(), "each element comes once"
                into[offset : offset + length] = values[rank][start : start + length]
                start += length
    for rank in range(world):
        for row in sides.wanted:
            assert (got[rank][row.full_name, row.expert] == shard(row, sampler, rank % sampler, tensors)).all()
    moved = traffic(sides, shipments)
    assert moved.received.sum(0).tolist() == moved.bound.tolist()
    assert moved.into_node.tolist() == moved.node_bound.tolist()


def test_equal_layouts_move_nothing() -> None:
    model = Architecture.of(DENSE | {"vocab_size": 128, "num_key_value_heads": 4})
    sides = Sides(model, Layout(tensor=4), table(model, fused=False), 4, vllm_rows(model), 8, 8, 2)
    # Query, key and value lie in another order, but each rank has its own heads.
    assert traffic(sides, plan(sides, 1 << 30)).received.sum() == 0


def test_the_volume_of_a_known_case() -> None:
    """Four tensor ranks of two stages hand over to samplers of two, which are neighbours: a rank wants half of a matrix
    and holds, on its own stage, a quarter; ranks 0 and 3 of four find theirs in their half, 1 and 2 do not."""
    model = Architecture.of(UNTIED | {"vocab_size": 128, "num_hidden_layers": 2})
    sides = Sides(model, Layout(tensor=4, pipeline=2), table(model, fused=False), 2, vllm_rows(model), 8, 8, 1)
    matrix = 16 * 24
    down = [s for s in plan(sides, 1 << 30) if s.target.full_name == "model.layers.0.mlp.down_proj.weight"]
    received = np.zeros(8, np.int64)
    for shipment in down:
        received[shipment.receivers] += shipment.bytes
    # Ranks 0 and 2 want the first half, 1 and 3 the second; rank r of stage 0 holds quarter r.
    assert (received / matrix).tolist() == [0.25, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5, 0.5]


def test_a_sampler_that_wants_whole_tensors_gets_them() -> None:
    model = Architecture.of(SPARSE)
    rows = whole(vllm_rows(model))
    sides = Sides(model, Layout(expert=4), table(model, fused=False), 1, rows, 4, 4, 4)
    moved = traffic(sides, plan(sides, 1 << 30))
    assert moved.received.sum(0).tolist() == moved.bound.tolist()
    size = sum(int(np.prod(shape)) for row in rows for shape in row.shapes) * 4
    assert (moved.kept + moved.received.sum(0)).tolist() == [size] * 4


def test_what_does_not_fit_is_refused() -> None:
    model = Architecture.of(DENSE)
    rows = table(model, fused=False)
    with pytest.raises(ValueError, match="samplers of 3 ranks do not fill 4 ranks"):
        Sides(model, Layout(), rows, 3, vllm_rows(model), 4, 4, 2)
    lacking = Sides(model, Layout(), [row for row in rows if row.place != 2], 1, vllm_rows(model), 4, 4, 2)
    with pytest.raises(ValueError, match=r"wants .*layers\.2\.input_layernorm"):
        list(plan(lacking, 1 << 20))
