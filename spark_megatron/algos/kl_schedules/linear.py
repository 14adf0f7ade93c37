"""A straight line over the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from spark_megatron.algos.kl_schedules.base import OpenLoop, check_coef
from spark_megatron.algos.schedule import between, progress


@dataclass(frozen=True, kw_only=True)
class Linear(OpenLoop):
    """From ``start`` at the first step to ``end`` at the last one."""

    start: float
    end: float

    def __post_init__(self) -> None:
        check_coef("start", self.start)
        check_coef("end", self.end)

    def coef(self, step: int, total_steps: int) -> float:
        return between(self.start, self.end, progress(step, total_steps))
