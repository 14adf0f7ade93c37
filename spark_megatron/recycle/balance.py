"""Even shares by an explicit generator: counts that differ by at most one, in an order that keeps them so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(streams: Sequence[Sequence[T]], rng: random.Random) -> list[T]:
    """All items in one list, each stream in its own order and evenly over the whole length, from a random start.

    Two streams of equal length alternate: any cut of the list holds as many of one as of the other, give or take one.
    """
    placed = []
    for number, stream in enumerate(streams):
        start = rng.random()
        placed += [((i + start) / len(stream), number, item) for i, item in enumerate(stream)]
    return [item for *_, item in sorted(placed, key=lambda entry: entry[:2])]


def alternating(n: int, period: int, rng: random.Random) -> list[bool]:
    """``n`` values of which half are True (give or take one), alternating from a random start.

    They stay independent of anything that repeats with ``period``: each position in it comes with both values.
    """
    start, shift = rng.randrange(2), 1 - period % 2
    return [(start + i + shift * (i // period)) % 2 == 0 for i in range(n)]


def halves(items: Sequence[T], rng: random.Random) -> tuple[list[T], list[T]]:
    """The items dealt at random into two lists of equal length, give or take one."""
    mixed = rng.sample(items, len(items))
    first = (len(items) + rng.randrange(2)) // 2
    return mixed[:first], mixed[first:]
