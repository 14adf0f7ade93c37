"""A ramp over the first steps, then level."""

from __future__ import annotations

from dataclasses import dataclass

from spark_megatron.algos.kl_schedules.base import OpenLoop, check_coef
from spark_megatron.algos.schedule import between


@dataclass(frozen=True, kw_only=True)
class Warmup(OpenLoop):
    """``start`` at step 0, in a straight line to ``end`` at step ``steps``, and ``end`` from there on.

    The length of the run does not matter, so that a run that is made longer keeps its coefficients.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_coef("start", self.start)
        check_coef("end", self.end)
        if self.steps < 1:
            raise ValueError(f"kl_schedule.steps={self.steps} must be >= 1 (kl_schedule=constant has no ramp)")

    def coef(self, step: int, total_steps: int) -> float:
        return between(self.start, self.end, min(step / self.steps, 1.0))
