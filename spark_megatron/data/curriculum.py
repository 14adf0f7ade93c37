"""Which of a pass's tasks come next, and how many more where some taught nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from spark_megatron.types import Task


class Order(Protocol):
    """Picks tasks, and may learn from how often they were solved."""

    def choose(self, tasks: Sequence[Task], position: int, n: int, rng: random.Random) -> list[Task]:
        """``n`` of a pass's ``tasks``, of which ``position`` were chosen before; there are at least ``n`` more."""
        ...

    def observe(self, accuracy: Mapping[str, float]) -> None:
        """The share of right answers of tasks that were just tried, by id."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Shuffled:
    """Every task of a pass once, in the pass's own order."""

    def choose(self, tasks: Sequence[Task], position: int, n: int, rng: random.Random) -> list[Task]:
        return list(tasks[position : position + n])

    def observe(self, accuracy: Mapping[str, float]) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


@dataclass
class Gaussian:
    """Draws tasks that are solved about as often as ``target``, which teach most (idea of FG-ExPO, form ours).

    Task q has the probability (1 - explore) w_q / sum w + explore / N with w_q = exp(-(p_q - target)^2 / (2 width^2)).
    p_q is its past accuracy, p <- p + rate (new - p), and ``target`` for a task that was never tried. Tasks of one draw
    are distinct, but a task may come again in the same pass: a pass is a number of draws. What a policy learns from is
    then no longer the tasks' own distribution; held-out figures still are. For tasks that come again: a generator of
    ever new ones has no past accuracies.
    """

    target: float
    width: float
    explore: float
    rate: float
    rates: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, value, low in (("target", self.target, 0.0), ("explore", self.explore, 0.0)):
            if not low <= value <= 1.0:
                raise ValueError(f"{name}={value}: must lie in [0, 1]")
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(f"rate={self.rate}: must lie in (0, 1]")
        if not 0.0 < self.width < math.inf:
            raise ValueError(f"width={self.width}: must be positive")

    def probabilities(self, tasks: Sequence[Task]) -> list[float]:
        """Of each task to be the next one drawn; they sum to 1."""
        distances = [(self.rates.get(task.id, self.target) - self.target) / self.width for task in tasks]
        nearest = min(abs(distance) for distance in distances)
        # Relative to the nearest task, so that not all weights vanish where all are far away.
        weights = [math.exp((nearest**2 - distance**2) / 2) for distance in distances]
        total = sum(weights)
        return [(1 - self.explore) * weight / total + self.explore / len(tasks) for weight in weights]

    def choose(self, tasks: Sequence[Task], position: int, n: int, rng: random.Random) -> list[Task]:
        # The n largest of u^(1/w) are n draws by weight without putting back (Efraimidis and Spirakis, 2006).
        keys = [math.log(1.0 - rng.random()) / max(p, 1e-300) for p in self.probabilities(tasks)]
        best = sorted(range(len(tasks)), key=lambda index: (-keys[index], index))[:n]
        return [tasks[index] for index in best]

    def observe(self, accuracy: Mapping[str, float]) -> None:
        for task, new in accuracy.items():
            old = self.rates.get(task, new)
            self.rates[task] = old + self.rate * (new - old)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": dict(self.rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rates = dict(state.get("rates", {}))


@dataclass(frozen=True)
class Resample:
    """Tasks in place of those whose rollouts all earned the same, up to ``budget`` more in a step (as DAPO does)."""

    budget: int

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget={self.budget}: must be at least 1; null resamples nothing")

    def more(self, flat: int, spent: int) -> int:
        """How many tasks to draw after ``flat`` of the last ones taught nothing and ``spent`` were drawn on top."""
        return max(0, min(flat, self.budget - spent))
