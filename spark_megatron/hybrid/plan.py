"""Who sends which slice of the weights to whom, when the training layout hands over to the sampler's layout.

Pure arithmetic on the two sides' rows (``spark_megatron.slices``): nothing is imported that knows a device, so that the
plan of a thousand ranks can be studied on a laptop. All ranks compute the same plan and need not talk about it.

Everything is cut into *parcels*: slices of one parameter that the same tensor-parallel ranks hold and the same ranks of
a sampler want. A rank that wants a parcel and holds it keeps it; any other gets it exactly once, from a holder on its
own node where there is one. Otherwise one rank of the node gets it from a holder elsewhere and forwards it to its
neighbours, so that nothing crosses the border of a node twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spark_megatron.architecture import Architecture, Layout
from spark_megatron.engine.weights.home import home, position
from spark_megatron.slices import Row, Segment

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Parcel:
    """Slices of one row that travel together; lengths and offsets count along the row's dimension."""

    lengths: tuple[int, ...]
    held: Mapping[int, tuple[int, ...]]
    """Offsets of the slices in the trainer's parameter, by the tensor-parallel ranks that have them."""
    wanted: Mapping[int, tuple[int, ...]]
    """Offsets in the sampler's parameter, by the ranks of a sampler that want them."""

    def __len__(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Shipment:
    """One parcel and its way: ``receivers[i]`` gets it from ``senders[i]``, which itself waits for it if ``later[i]``.

    All are global ranks. ``keepers`` want it and hold it already.
    """

    sources: tuple[Row, ...]
    """The trainer's rows that have it: one, or two of a tied embedding that both pipeline ends hold."""
    target: Row
    parcel: Parcel
    bytes: int
    keepers: Ranks
    receivers: Ranks
    senders: Ranks
    later: NDArray[np.bool_]

    @property
    def contiguous(self) -> bool:
        """Whether the parcel lies in one piece in the trainer's parameter."""
        return len(self.parcel.lengths) == 1 and self.target.dim == 0


@dataclass(frozen=True)
class Sides:
    """The trainer's layout and the samplers' on the same ``world`` ranks, ``node`` of them on each node."""

    model: Architecture
    layout: Layout
    rows: Sequence[Row]
    """The trainer's table."""
    tensor_parallel: int
    """Ranks of one sampler; they are consecutive."""
    wanted: Sequence[Row]
    """The sampler's table."""
    world: int
    node: int
    itemsize: int

    def __post_init__(self) -> None:
        if self.world % self.tensor_parallel:
            raise ValueError(
                f"samplers of {self.tensor_parallel} ranks do not fill {self.world} ranks: choose a tensor-parallel "
                "degree that divides them"
            )

    @cached_property
    def sources(self) -> dict[str, tuple[Row, ...]]:
        """The trainer's rows that hold an HF tensor."""
        found: dict[str, tuple[Row, ...]] = {}
        for row in self.rows:
            if row.exported or self.layout.pipeline > 1:  # a tied head on the embedding's own stage is the embedding
                for name in row.hf:
                    found[name] = (*found.get(name, ()), row)
        return found

    @cached_property
    def positions(self) -> dict[str, Ranks]:
        """Each rank's place: "tensor", "pipeline" and "expert" in training, "sampler" among its sampler's ranks."""
        places = [position(rank, self.layout, self.world) for rank in range(self.world)]
        found = {name: np.array([getattr(p, name) for p in places]) for name in ("tensor", "pipeline", "expert")}
        ranks = np.arange(self.world)
        return found | {"sampler": ranks % self.tensor_parallel, "node": ranks // self.node}

    def stages(self, source: Row) -> NDArray[np.bool_]:
        """Which ranks have a parameter of ``source``, whatever slice of it."""
        at, where = home(source, self.model, self.layout), self.positions
        found = where["pipeline"] == at.stage
        return found if at.expert_rank is None else found & (where["expert"] == at.expert_rank)


def plan(sides: Sides, most_bytes: int) -> Iterator[Shipment]:
    """All shipments of a hand-over in the order of the sampler's table; a parcel has at most ``most_bytes``.

    Raises:
        ValueError: the sampler wants a tensor that the trainer has not.
    """
    where = sides.positions
    router = _Router(where["node"])
    for sources, target in pairs(sides):
        width = target.elements // sum(shape[target.dim] for shape in target.shapes) * sides.itemsize
        has = np.logical_or.reduce([sides.stages(source) for source in sources])
        groups: dict[tuple[tuple[int, ...], ...], tuple[Ranks, Ranks, Ranks]] = {}
        for parcel in parcels(*_geometry(sides, sources[0], target), max(1, most_bytes // width)):
            between = tuple(parcel.held), tuple(parcel.wanted)
            if between not in groups:
                holds = has & _marked(between[0], sides.layout.tensor)[where["tensor"]]
                wants = _marked(between[1], sides.tensor_parallel)[where["sampler"]]
                kept, missing = np.flatnonzero(wants & holds), np.flatnonzero(wants & ~holds)
                groups[between] = kept, np.flatnonzero(holds), missing
            keepers, holders, receivers = groups[between]
            size = len(parcel) * width
            yield Shipment(sources, target, parcel, size, keepers, *router.routes(holders, receivers, size))


def _marked(chosen: Sequence[int], count: int) -> NDArray[np.bool_]:
    """Which of the numbers below ``count`` are chosen."""
    found = np.zeros(count, bool)
    found[list(chosen)] = True
    return found


def pairs(sides: Sides) -> Iterator[tuple[tuple[Row, ...], Row]]:
    """Each of the sampler's rows behind the trainer's rows that have its tensors."""
    for target in sides.wanted:
        missing = [name for name in target.hf if name not in sides.sources]
        if missing:
            raise ValueError(f"the sampler wants {missing}, and the trainer has no such tensors")
        yield sides.sources[target.hf[0]], target


def _geometry(sides: Sides, source: Row, target: Row) -> tuple[Cuts, Cuts]:
    """Both sides' cuts of the tensors of ``target``."""
    numbers = [source.hf.index(name) for name in target.hf]
    return (
        _cuts(source.blocks, source.cut, source.multiple, source.most, sides.layout.tensor, tuple(numbers)),
        _cuts(target.blocks, target.cut, target.multiple, target.most, sides.tensor_parallel, None),
    )


Cut = tuple[int, int, int]
"""(start, stop, offset): elements of an HF tensor, and where a rank's parameter has the first of them."""

Cuts = tuple[tuple[tuple[Cut, ...], ...], ...]
"""Cuts by HF tensor, and by tensor-parallel rank."""


@cache
def _cuts(
    blocks: tuple[tuple[Segment, ...], ...],
    cut: bool,
    multiple: int,
    most: tuple[int | None, ...],
    degree: int,
    numbers: tuple[int, ...] | None,
) -> Cuts:
    row = Row((), (), "", 0, blocks, cut=cut, multiple=multiple, most=most)
    held = [list(row.segments(degree, rank)) for rank in range(degree)]
    tensors = numbers or range(1 + max(segment.tensor for block in blocks for segment in block))
    return tuple(
        tuple(tuple((s.start, s.stop, offset) for offset, s in of if s.tensor == tensor) for of in held)
        for tensor in tensors
    )


@cache
def parcels(held: Cuts, wanted: Cuts, most: int) -> tuple[Parcel, ...]:
    """The parcels of one row, none longer than ``most`` along its dimension."""
    grouped: dict[tuple[frozenset[int], frozenset[int]], list[_Piece]] = {}
    for theirs, ours in zip(held, wanted, strict=True):
        for piece in _pieces(theirs, ours):
            grouped.setdefault((frozenset(piece.held), frozenset(piece.wanted)), []).append(piece)
    found: list[Parcel] = []
    for pieces in grouped.values():
        merged = _merged(pieces)
        for load in _loads(merged, most):
            found.append(
                Parcel(
                    tuple(piece.length for piece in load),
                    {rank: tuple(piece.held[rank] for piece in load) for rank in load[0].held},
                    {rank: tuple(piece.wanted[rank] for piece in load) for rank in load[0].wanted},
                )
            )
    return tuple(found)


@dataclass(frozen=True)
class _Piece:
    """Elements that lie behind one another on every rank that has them or wants them, and where."""

    length: int
    held: Mapping[int, int]
    wanted: Mapping[int, int]

    def part(self, start: int, stop: int) -> _Piece:
        return _Piece(
            stop - start,
            {rank: offset + start for rank, offset in self.held.items()},
            {rank: offset + start for rank, offset in self.wanted.items()},
        )


def _pieces(held: Sequence[Sequence[Cut]], wanted: Sequence[Sequence[Cut]]) -> Iterator[_Piece]:
    """One tensor between all borders of both sides."""
    borders = sorted({border for side in (held, wanted) for cuts in side for cut in cuts for border in cut[:2]})
    for low, high in pairwise(borders):
        found = [
            {
                rank: offset + low - start
                for rank, cuts in enumerate(side)
                for start, stop, offset in cuts
                if start <= low < stop
            }
            for side in (held, wanted)
        ]
        if found[1]:
            if not found[0]:
                raise ValueError(f"no rank of the trainer holds the elements {low} to {high} that a sampler wants")
            yield _Piece(high - low, *found)


def _merged(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The same with neighbours on all ranks joined."""
    joined: list[_Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.part(last.length, last.length + piece.length) == piece:
            joined[-1] = _Piece(last.length + piece.length, last.held, last.wanted)
        else:
            joined.append(piece)
    return joined


def _loads(pieces: Sequence[_Piece], most: int) -> Iterator[list[_Piece]]:
    """Consecutive pieces, cut where needed, of at most ``most`` elements together."""
    load: list[_Piece] = []
    room = most
    for piece in pieces:
        start = 0
        while start < piece.length:
            stop = min(piece.length, start + room)
            load.append(piece.part(start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield load
                load, room = [], most
    if load:
        yield load


class _Router:
    """Chooses who sends, each time those who have had the least to do. ``node`` is the node of each rank."""

    def __init__(self, node: Ranks) -> None:
        self.node, self.nodes = node, int(node[-1]) + 1
        # Bytes so far: sent to other nodes, received from them, sent to receivers on the same node by holders.
        self.sent, self.received, self.shared = np.zeros((3, len(node)), np.int64)

    def routes(self, holders: Ranks, receivers: Ranks, size: int) -> tuple[Ranks, Ranks, NDArray[np.bool_]]:
        """(receivers, senders, later), see ``Shipment``, of a parcel of ``size`` bytes."""
        here = self.node[receivers]
        at_hand = np.bincount(self.node[holders], minlength=self.nodes)
        near = at_hand[here] > 0
        senders, later = np.zeros_like(receivers), np.zeros(len(receivers), bool)
        if near.any():
            senders[near] = self._neighbours(holders, at_hand, here[near])
            np.add.at(self.shared, senders[near], size)
        if not near.all():
            leaders = self._leaders(receivers, np.flatnonzero(~near))
            ranked = holders[np.argsort(self.sent[holders], kind="stable")]
            senders[leaders] = ranked[np.arange(len(leaders)) % len(ranked)]
            np.add.at(self.sent, senders[leaders], size)
            self.received[receivers[leaders]] += size
            later = ~near
            later[leaders] = False
            leader_of = np.zeros(self.nodes, np.int64)
            leader_of[here[leaders]] = receivers[leaders]
            senders[later] = leader_of[here[later]]
        return receivers, senders, later

    def _neighbours(self, holders: Ranks, at_hand: Ranks, here: Ranks) -> Ranks:
        """A holder on the same node for each receiver, given the sorted nodes of the receivers."""
        ranked = holders[np.lexsort((self.shared[holders], self.node[holders]))]
        wants = np.bincount(here, minlength=self.nodes)
        number = np.arange(len(here)) - (np.cumsum(wants) - wants)[here]
        return ranked[(np.cumsum(at_hand) - at_hand)[here] + number % at_hand[here]]

    def _leaders(self, receivers: Ranks, far: Ranks) -> Ranks:
        """Of the receivers numbered ``far`` the number of one on each node."""
        ordered = far[np.lexsort((self.received[receivers[far]], self.node[receivers[far]]))]
        here = self.node[receivers[ordered]]
        return ordered[np.concatenate(([True], here[1:] != here[:-1]))]
