"""What the plan moves: bounds against sets of single elements, volumes worked out by hand, balance, predicted time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_megatron.architecture import Architecture, Layout
from spark_megatron.engine.weights.home import home, position
from spark_megatron.engine.weights.table import elements, table
from spark_megatron.hybrid.plan import Shipment, Sides, plan
from spark_megatron.hybrid.traffic import BETWEEN, FORWARDED, INSIDE, Traffic, bounds, traffic
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.slices import Row

EVEN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "intermediate_size": 64,
    "vocab_size": 512,
}
"""Every matrix falls into eight equal parts on both sides, and the vocabulary is padded on neither."""
ODD = EVEN | {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 301, "tie_word_embeddings": True}
EXPERTS = EVEN | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "vocab_size": 73,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
}


def sides(config: dict[str, Any], layout: Layout, sampler: int, world: int, node: int, only_cut: bool = False) -> Sides:
    """Both sides with one byte per element; ``only_cut`` leaves norms and all else out that every rank has whole."""
    model = Architecture.of(config)
    rows, wanted = (
        [row for row in side if row.cut or not only_cut] for side in (table(model, fused=False), vllm_rows(model))
    )
    return Sides(model, layout, rows, sampler, wanted, world, node, itemsize=1)


def moved(between: Sides, most_bytes: int = 1 << 30) -> Traffic:
    return traffic(between, plan(between, most_bytes))


CASES = [
    (EVEN, Layout(tensor=4, pipeline=2), 2, 8, 8),
    (EVEN, Layout(tensor=2, pipeline=2, virtual=2), 8, 8, 3),
    (ODD, Layout(tensor=4, pipeline=2), 1, 8, 2),
    (ODD, Layout(tensor=4, context=2), 8, 16, 4),
    (ODD, Layout(pipeline=4), 2, 8, 4),
    (EXPERTS, Layout(expert=4, pipeline=2), 4, 8, 2),
    (EXPERTS, Layout(tensor=2, sequence=True, expert=2, context=2), 2, 8, 4),
]


def slices(row: Row, degree: int, rank: int) -> set[tuple[str, int]]:
    """What one of ``degree`` ranks has of a row: HF tensor and index along the row's dimension."""
    return {(row.hf[s.tensor], at) for _, s in row.segments(degree, rank) for at in range(s.start, s.stop)}


@pytest.mark.parametrize(("config", "layout", "sampler", "world", "node"), CASES)
def test_bounds_are_those_of_sets_of_slices(
    config: dict[str, Any], layout: Layout, sampler: int, world: int, node: int
) -> None:
    """And the plan meets them, whatever the size of a parcel."""
    between = sides(config, layout, sampler, world, node)
    widths = {
        name: int(np.prod(shape)) // shape[row.dim]
        for row in between.wanted
        for name, shape in zip(row.hf, row.shapes, strict=True)
    }
    needs: list[set[tuple[str, int]]] = []
    holds: list[set[tuple[str, int]]] = []
    for rank in range(world):
        place = position(rank, layout, world)
        needs.append(set().union(*(slices(row, sampler, rank % sampler) for row in between.wanted)))
        homes = [(row, home(row, between.model, layout)) for row in between.rows if row.exported or layout.pipeline > 1]
        mine = [r for r, at in homes if at.stage == place.pipeline and at.expert_rank in (None, place.expert)]
        holds.append(set().union(*(slices(row, layout.tensor, place.tensor) for row in mine)))

    def size(missing: set[tuple[str, int]]) -> int:
        return sum(widths[name] for name, _ in missing)

    per_rank = [size(need - held) for need, held in zip(needs, holds, strict=True)]
    starts = range(0, world, node)
    per_node = [size(set().union(*needs[i : i + node]) - set().union(*holds[i : i + node])) for i in starts]
    assert [bound.tolist() for bound in bounds(between)] == [per_rank, per_node]
    for most in (1, 1000, 1 << 30):
        found = moved(between, most)
        assert found.received.sum(0).tolist() == per_rank
        assert found.into_node.tolist() == per_node
        assert found.sent.sum(1).tolist() == found.received.sum(1).tolist()
        assert found.out_of_node.sum() == found.into_node.sum()
        assert found.kept.tolist() == [size(need & held) for need, held in zip(needs, holds, strict=True)]


@pytest.mark.parametrize(("config", "layout", "sampler", "world", "node"), CASES)
def test_forwarding_stays_on_the_node_and_waits_for_one_that_does_not(
    config: dict[str, Any], layout: Layout, sampler: int, world: int, node: int
) -> None:
    def arrived(shipment: Shipment) -> set[int]:
        return set(shipment.receivers[~shipment.later].tolist())

    between = sides(config, layout, sampler, world, node)
    for shipment in plan(between, 1000):
        later = shipment.later
        assert set(shipment.senders[later].tolist()) <= arrived(shipment)
        assert (shipment.senders[later] // node == shipment.receivers[later] // node).all()


@pytest.mark.parametrize("order", ["4 x 2 to 2", "8 to 8", "2 stages"])
def test_volumes_worked_out_by_hand(order: str) -> None:
    """In eighths of the model's bytes, of which both stages hold one half (embedding and head are of one size).

    Four tensor ranks of two stages to samplers of two: a rank wants one half of everything. Ranks 0 and 2 of four want
    the first, 1 and 3 the second; rank r holds quarter r of its stage, an eighth of the model, which is wanted by 0 and
    3 and of no use to 1 and 2. As many tensor ranks as a sampler has: nothing moves, although query, key and value lie
    in another order. Two stages to samplers of one: the other stage's half.
    """
    layout, sampler, world, expected = {
        "4 x 2 to 2": (Layout(tensor=4, pipeline=2), 2, 8, [3, 4, 4, 3, 3, 4, 4, 3]),
        "8 to 8": (Layout(tensor=8), 8, 16, [0] * 16),
        "2 stages": (Layout(pipeline=2), 1, 2, [4, 4]),
    }[order]
    between = sides(EVEN, layout, sampler, world, 8, only_cut=True)
    received = moved(between).received.sum(0)
    assert (received * 8 / elements(between.rows)).tolist() == expected


def test_a_node_gets_only_once_what_all_of_its_ranks_want() -> None:
    """Two tensor ranks of two stages, four replicas: the nodes of eight ranks hold a stage each, and want all. Each
    rank wants half of the other stage, a quarter of the model, and eight get a half of the model from outside."""
    between = sides(EVEN, Layout(tensor=2, pipeline=2), 2, 16, 8, only_cut=True)
    found, size = moved(between), elements(between.rows)
    assert found.received.sum(0).tolist() == [size / 4] * 16
    assert found.into_node.tolist() == found.out_of_node.tolist() == [size / 2] * 2
    assert found.received[FORWARDED].sum() == 2 * (8 * size / 4 - size / 2)
    assert found.received[INSIDE].sum() == 0


@pytest.mark.parametrize(
    ("layout", "sampler", "world", "node"),
    [
        (Layout(tensor=2, pipeline=2), 2, 16, 8),
        (Layout(tensor=4, pipeline=2), 1, 16, 8),
        (Layout(pipeline=4), 1, 16, 4),
        (Layout(tensor=8, pipeline=4), 8, 64, 8),
    ],
)
def test_the_work_is_spread(layout: Layout, sampler: int, world: int, node: int) -> None:
    """Among the ranks of a stage, which hold equally much, no link has a tenth more to do than the mean."""
    between = sides(EVEN | {"num_hidden_layers": 32}, layout, sampler, world, node, only_cut=True)
    found = moved(between, 4096)
    for way in (*found.sent, *found.received, found.sent.sum(0)):
        for stage in range(layout.pipeline):
            of_stage = way[between.positions["pipeline"] == stage]
            assert of_stage.max() <= 1.1 * of_stage.mean()
    assert found.busiest_sender == found.sent.sum(0).argmax()


def test_the_predicted_time_is_that_of_the_busiest_links() -> None:
    """Two nodes of two ranks. The links work at once and both ways; what is forwarded comes after the rest."""
    received, sent = np.zeros((2, 3, 4), np.int64)
    received[BETWEEN] = [0, 0, 600, 0]
    sent[BETWEEN] = [200, 400, 0, 0]
    received[INSIDE] = [700, 0, 0, 0]
    sent[INSIDE] = [0, 700, 0, 0]
    received[FORWARDED] = [0, 0, 0, 600]
    sent[FORWARDED] = [0, 0, 600, 0]
    nothing = np.zeros(4, np.int64)
    found = Traffic(np.array([0, 0, 1, 1]), received, sent, nothing, received.sum(0), np.array([0, 600]), parcels=3)
    assert found.seconds(inside=100, between=10) == (60, 7, 6)
    assert found.predicted(inside=100, between=10) == 66
    assert found.predicted(inside=100, between=1000) == 7 + 6
    assert (found.into_node.tolist(), found.out_of_node.tolist()) == ([0, 600], [600, 0])
    assert found.busiest_sender == 1
