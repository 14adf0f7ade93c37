"""Which groups carry a learning signal."""

from __future__ import annotations

from collections.abc import Sequence


def is_flat(rewards: Sequence[float | None]) -> bool:
    """Whether a group gives no policy gradient: fewer than two unmasked rewards, or all of them equal.

    None marks a masked rollout. The rewards are compared as they are, not their standard deviation: eight times 0.7
    is flat however a mean of them rounds. Give the verified rewards, before any shaping: a length penalty makes eight
    right answers differ although the task has nothing left to teach.
    """
    return len({r for r in rewards if r is not None}) < 2
