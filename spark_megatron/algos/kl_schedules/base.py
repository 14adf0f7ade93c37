"""What every schedule of the KL coefficient offers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol


class KLSchedule(Protocol):
    """Gives the KL coefficient of each step; may learn from the KL that was measured.

    All ranks must call it with equal arguments, or their coefficients drift apart: observe the global mean.
    """

    def coef(self, step: int, total_steps: int) -> float:
        """The coefficient (>= 0) of ``step``, which counts from 0; steps past the end keep the last value."""
        ...

    def observe(self, kl: float) -> None:
        """Takes the mean KL per token (nats) of an update. Called once after each one that had policy tokens."""
        ...

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from :meth:`state_dict`; ValueError where the keys are those of another schedule."""
        ...


class OpenLoop:
    """Base of schedules that look at the step alone: they observe nothing and have no state."""

    def observe(self, kl: float) -> None:
        """Ignored."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        check_state(state, expected=())


def check_state(state: Mapping[str, float], expected: tuple[str, ...]) -> None:
    """ValueError unless ``state`` has exactly the ``expected`` keys."""
    if set(state) != set(expected):
        raise ValueError(
            f"the checkpoint's kl_schedule state has the keys {sorted(state)}, this schedule needs {sorted(expected)}: "
            "resume with the kl_schedule that the run was started with"
        )


def check_coef(name: str, value: float) -> None:
    """ValueError unless ``value`` can be a KL coefficient: finite and not negative."""
    if not 0 <= value < math.inf:
        raise ValueError(f"kl_schedule.{name}={value} must be a finite number >= 0, e.g. 0.001")
