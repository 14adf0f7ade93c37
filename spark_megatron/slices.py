"""How a parameter consists of pieces of Hugging Face tensors, and what each tensor-parallel rank has of it.

Trainer and sampler cut, fuse and order the same tensors differently. Each side describes its parameters by a list of
:class:`Row`; loading, export, and the plan of who hands which slice to whom all follow from such lists. Plain data and
arithmetic: this module loads no library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FIRST, LAST = "first", "last"
"""Places of rows that belong to a pipeline end rather than to a layer."""

Place = int | str
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` of the HF tensor number ``tensor`` of a row, along the row's dimension."""

    tensor: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Block = tuple[Segment, ...]


@dataclass(frozen=True)
class Row:
    """One parameter, or one expert's share of a parameter that holds all experts of a layer.

    Tensor parallelism cuts each of ``blocks`` into equal parts; rank r holds the r-th part of every block, one behind
    the other. A block that does not divide is padded with zeros at its end (the vocabulary).
    """

    hf: tuple[str, ...]
    """Names of the HF tensors."""
    shapes: tuple[Shape, ...]
    """Their shapes."""
    pattern: str
    """The parameter's name with {layer} and {expert} for the indices."""
    place: Place
    """The layer, counted over the whole model, or the pipeline end that holds the parameter."""
    blocks: tuple[Block, ...]
    dim: int = 0
    """The dimension along which segments lie behind one another."""
    cut: bool = True
    """Whether tensor parallelism cuts the parameter; otherwise every rank holds all of it."""
    expert: int | None = None
    """The expert, counted over all of its layer."""
    exported: bool = True
    """False for a second copy of another row's tensor."""
    multiple: int = 1
    """A block is padded to a multiple of this before it is cut."""
    most: tuple[int | None, ...] = ()
    """Per block the largest number of parts; with more ranks, consecutive ones hold the same part (key-value heads)."""

    def name(self, layer: int | None = None, expert: int | None = None) -> str:
        """The parameter's name in a model part that counts this layer and expert as given."""
        return self.pattern.format(layer=layer, expert=expert)

    @property
    def full_name(self) -> str:
        """The parameter's name in a model that is on one rank as a whole."""
        return self.name(self.place if isinstance(self.place, int) else None, self.expert)

    @property
    def elements(self) -> int:
        """Number of elements of the HF tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    def _parts(self, tp: int) -> Iterator[tuple[Block, int, int]]:
        """(block, number of its parts, length of one) for ``tp`` ranks."""
        for block, most in zip(self.blocks, self.most or (None,) * len(self.blocks), strict=True):
            parts = min(tp, most or tp) if self.cut else 1
            padded = -(-sum(map(len, block)) // self.multiple) * self.multiple
            yield block, parts, -(-padded // parts)

    def shard_shape(self, tp: int) -> Shape:
        """Shape of the parameter on each of ``tp`` tensor-parallel ranks."""
        size = sum(length for _, _, length in self._parts(tp))
        return (*self.shapes[0][: self.dim], size, *self.shapes[0][self.dim + 1 :])

    def segments(self, tp: int, rank: int) -> Iterator[tuple[int, Segment]]:
        """(offset in the parameter, segment) of everything that tensor-parallel rank ``rank`` holds, in order.

        What no segment covers is padding.
        """
        base = 0
        for block, parts, length in self._parts(tp):
            begin = rank * parts // tp * length
            end = begin + length
            position = 0
            for segment in block:
                low, high = max(begin, position), min(end, position + len(segment))
                if low < high:
                    shift = segment.start - position
                    yield base + low - begin, Segment(segment.tensor, low + shift, high + shift)
                position += len(segment)
            base += length


def copy(name: str, pattern: str, place: Place, shape: Shape, *, dim: int | None = None, **more: Any) -> Row:
    """One tensor, the same on both sides, cut along ``dim`` (None: replicated)."""
    blocks = ((Segment(0, 0, shape[dim or 0]),),)
    return Row((name,), (shape,), pattern, place, blocks, dim or 0, dim is not None, **more)


def whole(rows: Sequence[Row]) -> list[Row]:
    """What one holds who keeps every HF tensor of ``rows`` whole and under its own name, module by module."""
    modules: dict[str, list[Row]] = {}
    for row in rows:
        if row.exported:
            for name, shape in zip(row.hf, row.shapes, strict=True):
                block = (Segment(0, 0, shape[row.dim]),)
                one = Row((name,), (shape,), name, row.place, (block,), row.dim, cut=False)
                modules.setdefault(name.rpartition(".")[0], []).append(one)
    return [row for module in modules.values() for row in module]
