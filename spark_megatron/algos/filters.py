"""Which groups carry a learning signal, and how varied their responses are."""

from __future__ import annotations

from collections.abc import Sequence


def is_flat(rewards: Sequence[float | None]) -> bool:
    """Whether a group gives no policy gradient: fewer than two unmasked rewards, or all of them equal.

    None marks a masked rollout. The rewards are compared as they are, not their standard deviation: eight times 0.7
    is flat however a mean of them rounds. Give the verified rewards, before any shaping: a length penalty makes eight
    right answers differ although the task has nothing left to teach.
    """
    return len({r for r in rewards if r is not None}) < 2


def flat_share(groups: Sequence[Sequence[float | None]]) -> float:
    """Share in [0, 1] of groups for which :func:`is_flat` holds; 0 when there are no groups."""
    return sum(map(is_flat, groups)) / len(groups) if groups else 0.0


def distinct_share(groups: Sequence[Sequence[str]]) -> float:
    """Mean over the groups of (number of different texts / number of texts), in (0, 1]; 1 when there is no text.

    A low share means that a group compares copies of one response, which a higher sampling temperature cures.
    Texts that differ only in surrounding white space are the same. Empty groups are left out of the mean.
    """
    shares = [len({text.strip() for text in texts}) / len(texts) for texts in groups if texts]
    return sum(shares) / len(shares) if shares else 1.0
