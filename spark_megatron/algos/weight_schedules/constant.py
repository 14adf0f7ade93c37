"""The same weights for the whole run."""

from __future__ import annotations

from collections.abc import Mapping

from spark_megatron.algos.weight_schedules.base import checked_weights
from spark_megatron.types import Component


class Constant:
    """``values`` at every step."""

    def __init__(self, *, values: Mapping[str, float]) -> None:
        self._values = checked_weights("values", values)

    def weights(self, step: int, total_steps: int) -> dict[Component, float]:
        return dict(self._values)
