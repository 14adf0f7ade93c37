"""A straight line per objective over the whole run."""

from __future__ import annotations

from collections.abc import Mapping

from spark_megatron.algos.schedule import between, progress
from spark_megatron.algos.weight_schedules.base import checked_weights
from spark_megatron.types import Component


class Linear:
    """From the weights ``start`` at the first step to ``end`` at the last one."""

    def __init__(self, *, start: Mapping[str, float], end: Mapping[str, float]) -> None:
        self._start = checked_weights("start", start)
        self._end = checked_weights("end", end)

    def weights(self, step: int, total_steps: int) -> dict[Component, float]:
        share = progress(step, total_steps)
        return {name: between(self._start[name], self._end[name], share) for name in self._start}
