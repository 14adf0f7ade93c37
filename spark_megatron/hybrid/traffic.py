"""What a hand-over's plan moves over which links, the least that any plan could move, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_megatron.hybrid.plan import Ranks, Shipment, Sides, pairs
from spark_megatron.slices import Row

BETWEEN, INSIDE, FORWARDED = range(3)
"""Ways to a receiver: from a holder on another node, from a holder on its own, from a neighbour who got it before."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one hand-over."""

    node: Ranks
    """The node of each rank."""
    received: NDArray[np.int64]
    """[ways, ranks]"""
    sent: NDArray[np.int64]
    """[ways, ranks]"""
    kept: Ranks
    """Per rank what its sampler wants and its trainer holds."""
    bound: Ranks
    """Per rank what its sampler wants and its trainer does not hold: the least that it can receive."""
    node_bound: Ranks
    """Per node what some sampler on it wants and no trainer on it holds: the least that can come from other nodes."""
    parcels: int

    @cached_property
    def into_node(self) -> Ranks:
        """Bytes that come from other nodes, per node."""
        return self._by_node(self.received[BETWEEN])

    @cached_property
    def out_of_node(self) -> Ranks:
        """Bytes that go to other nodes, per node."""
        return self._by_node(self.sent[BETWEEN])

    @property
    def busiest_sender(self) -> int:
        """The rank that sends most."""
        return int(self.sent.sum(0).argmax())

    def seconds(self, inside: float, between: float) -> tuple[float, float, float]:
        """Seconds per way, given the speeds of a rank's link inside its node and to other nodes, in bytes per second.

        The model: each rank has one link of either kind, which works in both directions at once and is never idle, so
        that a way takes as long as its busiest link. What holders send goes over both kinds of links at the same time;
        what is forwarded comes after it (``predicted``). Latency and the copying of bytes in memory are left out.
        """
        most = np.maximum(self.received, self.sent).max(1)
        return float(most[BETWEEN]) / between, float(most[INSIDE]) / inside, float(most[FORWARDED]) / inside

    def predicted(self, inside: float, between: float) -> float:
        """Seconds of the hand-over, see ``seconds``."""
        ways = self.seconds(inside, between)
        return max(ways[BETWEEN], ways[INSIDE]) + ways[FORWARDED]

    def _by_node(self, per_rank: Ranks) -> Ranks:
        found = np.zeros(int(self.node[-1]) + 1, np.int64)
        np.add.at(found, self.node, per_rank)
        return found


def traffic(sides: Sides, shipments: Iterable[Shipment]) -> Traffic:
    """Add up ``shipments``, all those of the plan of ``sides``."""
    node, world = sides.positions["node"], sides.world
    received, sent = np.zeros((2, 3 * world), np.int64)
    kept = np.zeros(world, np.int64)
    parcels = 0
    for shipment in shipments:
        parcels += 1
        kept[shipment.keepers] += shipment.bytes
        crosses = node[shipment.senders] != node[shipment.receivers]
        way = np.where(crosses, BETWEEN, np.where(shipment.later, FORWARDED, INSIDE)) * world
        received[way + shipment.receivers] += shipment.bytes  # each of them is there once
        sent += np.bincount(way + shipment.senders, minlength=3 * world) * shipment.bytes
    bound, node_bound = bounds(sides)
    return Traffic(node, received.reshape(3, world), sent.reshape(3, world), kept, bound, node_bound, parcels)


def bounds(sides: Sides) -> tuple[Ranks, Ranks]:
    """``Traffic.bound`` and ``Traffic.node_bound``, from what both sides' rows say of every rank and no plan."""
    where = sides.positions
    node, tensor, sampler = where["node"], where["tensor"], where["sampler"]
    per_rank, per_node = np.zeros(sides.world, np.int64), np.zeros(int(node[-1]) + 1, np.int64)
    samplers = np.zeros((len(per_node), sides.tensor_parallel), bool)
    samplers[node, sampler] = True
    for sources, target in pairs(sides):
        numbers = tuple(sources[0].hf.index(name) for name in target.hf)
        length, held, wanted = _cells(
            _bare(sources[0]), sides.layout.tensor, numbers, _bare(target), sides.tensor_parallel
        )
        width = target.elements // sum(shape[target.dim] for shape in target.shapes) * sides.itemsize
        has = np.logical_or.reduce([sides.stages(source) for source in sources])
        overlap = (wanted * length) @ held.T
        per_rank += ((wanted @ length)[sampler] - has * overlap[sampler, tensor]) * width
        holders = np.zeros((len(per_node), sides.layout.tensor), bool)
        holders[node[has], tensor[has]] = True
        per_node += (samplers @ wanted & ~(holders @ held)) @ length * width
    return per_rank, per_node


def _bare(row: Row) -> Row:
    """A row without names: those of all layers are equal."""
    return replace(row, hf=(), shapes=(), pattern="", place=0, expert=None, exported=True)


Cover = NDArray[np.bool_]


@cache
def _cells(
    source: Row, held_by: int, numbers: tuple[int, ...], target: Row, wanted_by: int
) -> tuple[Any, Cover, Cover]:
    """(length, held, wanted): the tensors of ``target`` cut at all borders, and which tensor-parallel ranks have each
    of the cells; [cells], [ranks, cells] and [ranks, cells]. ``numbers`` are those of its tensors in ``source``."""
    held = [
        (rank, numbers.index(s.tensor), s.start, s.stop)
        for rank in range(held_by)
        for _, s in source.segments(held_by, rank)
        if s.tensor in numbers
    ]
    wanted = [
        (rank, s.tensor, s.start, s.stop) for rank in range(wanted_by) for _, s in target.segments(wanted_by, rank)
    ]
    borders = sorted({(tensor, at) for _, tensor, *ends in held + wanted for at in ends})
    number = {border: i for i, border in enumerate(borders)}
    length = [high[1] - low[1] if low[0] == high[0] else 0 for low, high in pairwise(borders)]
    covers = [np.zeros((degree, len(borders)), bool) for degree in (held_by, wanted_by)]
    for cover, ranges in zip(covers, (held, wanted), strict=True):
        for rank, tensor, start, stop in ranges:
            cover[rank, number[tensor, start] : number[tensor, stop]] = True
    return np.array([*length, 0]), covers[0], covers[1]
