"""What every schedule of the objective weights offers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from spark_megatron.types import Component

OBJECTIVES: tuple[Component, ...] = ("policy", "pointwise", "pairwise", "reflection")
"""The components of SPARK's joint objective, whose weights a schedule gives."""


class WeightSchedule(Protocol):
    """Gives the weight of each objective at each step."""

    def weights(self, step: int, total_steps: int) -> dict[Component, float]:
        """One weight (>= 0) per entry of ``OBJECTIVES``; steps count from 0, those past the end keep the last value."""
        ...


def checked_weights(name: str, weights: Mapping[str, float]) -> dict[Component, float]:
    """A copy of ``weights`` in the order of ``OBJECTIVES``.

    ValueError unless it has exactly one finite weight >= 0 per objective and at least one above 0.
    """
    if set(weights) != set(OBJECTIVES):
        raise ValueError(f"weight_schedule.{name} has the keys {sorted(weights)}, it needs {sorted(OBJECTIVES)}")
    for objective, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight_schedule.{name}.{objective}={weight} must be a finite number >= 0")
    if not any(weights.values()):
        raise ValueError(f"weight_schedule.{name} is 0 for every objective: nothing would be trained; raise one")
    return {objective: float(weights[objective]) for objective in OBJECTIVES}
