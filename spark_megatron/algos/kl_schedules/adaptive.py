"""A proportional controller that holds the measured KL near a target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_megatron.algos.kl_schedules.base import check_coef, check_state


@dataclass(kw_only=True)
class Adaptive:
    """``error = clip(kl / target - 1, -clip, clip)``, then ``coef *= 1 + gain * error`` (arXiv 1909.08593, sec. 2.2).

    There ``gain`` is 0.1 and ``clip`` 0.2: a factor between 0.98 and 1.02 per update. ``target`` is the mean KL per
    token in nats, not per sequence. Ours: the coefficient stays within ``[minimum, maximum]``, so that a long phase
    on one side of the target cannot carry it out of reach. ``initial`` is the coefficient of the first update.
    """

    initial: float
    target: float
    gain: float
    clip: float
    minimum: float
    maximum: float
    _coef: float = field(init=False)

    def __post_init__(self) -> None:
        for name in ("initial", "minimum", "maximum"):
            check_coef(name, getattr(self, name))
        if not 0 < self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"kl_schedule.initial={self.initial} must lie between kl_schedule.minimum={self.minimum} (above 0, a "
                f"coefficient of 0 could never grow again) and kl_schedule.maximum={self.maximum}"
            )
        if not 0 < self.target < math.inf:
            raise ValueError(f"kl_schedule.target={self.target} must be a finite number above 0 (nats per token)")
        if not (self.gain > 0 and self.clip > 0 and self.gain * self.clip < 1):
            raise ValueError(
                f"kl_schedule.gain={self.gain} and kl_schedule.clip={self.clip} must be above 0 with a product below "
                "1, or one update could make the coefficient negative; e.g. 0.1 and 0.2"
            )
        self._coef = self.initial

    def coef(self, step: int, total_steps: int) -> float:
        return self._coef

    def observe(self, kl: float) -> None:
        """Moves the coefficient once; ValueError for a NaN or infinite KL, from which there is nothing to learn."""
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}: the update diverged; lower the learning rate")
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        self._coef = self._bounded(self._coef * (1 + self.gain * error))

    def state_dict(self) -> dict[str, float]:
        return {"coef": self._coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        check_state(state, expected=("coef",))
        self._coef = self._bounded(state["coef"])

    def _bounded(self, coef: float) -> float:
        return min(max(coef, self.minimum), self.maximum)
