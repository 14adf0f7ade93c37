"""One coefficient for the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from spark_megatron.algos.kl_schedules.base import OpenLoop, check_coef


@dataclass(frozen=True, kw_only=True)
class Constant(OpenLoop):
    """``value`` at every step (SPARK: 0.001); 0 switches the term off."""

    value: float

    def __post_init__(self) -> None:
        check_coef("value", self.value)

    def coef(self, step: int, total_steps: int) -> float:
        return self.value
