"""Sees when a policy hacks its reward model: the reward in training rises while held-out verified accuracy falls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_megatron.types import Metrics


class HackingMonitor:
    """Compares each evaluation with the best one before it (ours; Cooper's Figure 1 shows the pattern).

    The reward model is hacked when held-out accuracy is ``drop`` or more below its best, and the mean reward since the
    last evaluation ``rise`` or more above what it was then.
    """

    def __init__(self, *, rise: float, drop: float) -> None:
        self._rise, self._drop = rise, drop
        self._sum, self._steps = 0.0, 0
        self._best: tuple[float, float] | None = None
        """(accuracy, mean reward) at the evaluation with the highest accuracy."""

    def observe(self, reward: float) -> None:
        """The mean reward of a step's rollouts."""
        self._sum, self._steps = self._sum + reward, self._steps + 1

    def evaluated(self, accuracy: float) -> Metrics:
        """Held-out verified accuracy; how far both have moved from the best evaluation ({} where no reward came)."""
        if not self._steps:
            return {}
        reward, self._sum, self._steps = self._sum / self._steps, 0.0, 0
        best_accuracy, then = self._best or (accuracy, reward)
        if self._best is None or accuracy > best_accuracy:
            self._best = (accuracy, reward)
        rise, drop = reward - then, best_accuracy - accuracy
        hacked = drop > 0 and drop >= self._drop and rise >= self._rise
        return {"hacking/reward_rise": rise, "hacking/accuracy_drop": drop, "hacking/alarm": float(hacked)}

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum, "steps": self._steps, "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sum, self._steps = state["sum"], state["steps"]
        self._best = None if state["best"] is None else tuple(state["best"])
