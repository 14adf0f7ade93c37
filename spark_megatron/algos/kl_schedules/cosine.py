"""Half a period of a cosine over the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_megatron.algos.kl_schedules.base import OpenLoop, check_coef
from spark_megatron.algos.schedule import between, progress


@dataclass(frozen=True, kw_only=True)
class Cosine(OpenLoop):
    """From ``start`` at the first step to ``end`` at the last one, flat at both (shape: SGDR, arXiv 1608.03983)."""

    start: float
    end: float

    def __post_init__(self) -> None:
        check_coef("start", self.start)
        check_coef("end", self.end)

    def coef(self, step: int, total_steps: int) -> float:
        share = (1 - math.cos(math.pi * progress(step, total_steps))) / 2
        return between(self.start, self.end, share)
