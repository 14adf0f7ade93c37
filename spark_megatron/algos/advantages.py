"""From the rewards of one group to the advantages of its rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from spark_megatron.algos.filters import is_flat


class Advantage(Protocol):
    """Turns the rewards of one group into advantages; None marks a masked rollout and stays None."""

    def __call__(self, rewards: Sequence[float | None]) -> tuple[float | None, ...]: ...


@dataclass(frozen=True, kw_only=True)
class ZScore:
    """``A_i = (r_i - baseline) / (std + eps)`` over the unmasked rewards of a group.

    ``baseline`` is the group's mean (SPARK, arXiv 2509.22624, Eq. 3) or its minimum, with which no rollout is pushed
    down. ``unbiased`` divides the variance by n - 1, as SPARK's released code does, rather than by n as its Eq. 3
    does. ``eps`` is added to the standard deviation (the released code; Eq. 3 has it under the root).

    A flat group (equal rewards, or a single unmasked one) gets exactly 0, whatever ``eps`` is.
    """

    eps: float
    unbiased: bool
    baseline: Literal["mean", "min"]

    def __post_init__(self) -> None:
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"advantage.eps={self.eps} must be a finite number >= 0, e.g. 1e-6")
        if self.baseline not in ("mean", "min"):
            raise ValueError(f"advantage.baseline={self.baseline!r} must be 'mean' or 'min'")

    def __call__(self, rewards: Sequence[float | None]) -> tuple[float | None, ...]:
        """Advantages in the order of ``rewards``; ValueError for a NaN or infinite reward (mask it with None)."""
        for i, r in enumerate(rewards):
            if r is not None and not math.isfinite(r):
                raise ValueError(f"reward {i} of a group is {r}; give None for a rollout that could not be scored")
        if is_flat(rewards):
            return tuple(None if r is None else 0.0 for r in rewards)
        known = [float(r) for r in rewards if r is not None]
        mean = math.fsum(known) / len(known)
        std = math.hypot(*(r - mean for r in known)) / math.sqrt(len(known) - self.unbiased)
        baseline = mean if self.baseline == "mean" else min(known)
        return tuple(None if r is None else (r - baseline) / (std + self.eps) for r in rewards)
