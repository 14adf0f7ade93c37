"""How long responses of each kind of task are expected to be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from spark_megatron.types import Group, TaskKind


class ResponseLengths:
    """A running mean of response lengths per kind of task: each new phase counts one half."""

    def __init__(self) -> None:
        self._means: dict[TaskKind, float] = {}

    def expected(self, kind: TaskKind, limit: int) -> float:
        """Tokens of a response of at most ``limit`` tokens; the limit where none of this kind was seen."""
        return min(self._means.get(kind, limit), limit)

    def observe(self, groups: Iterable[Group]) -> None:
        """Learn from the groups of one phase."""
        seen: dict[TaskKind, list[int]] = defaultdict(list)
        for group in groups:
            seen[group.task.kind] += [len(rollout.tokens) for rollout in group.rollouts]
        for kind, lengths in seen.items():
            if lengths:
                mean = sum(lengths) / len(lengths)
                self._means[kind] = (self._means.get(kind, mean) + mean) / 2

    def state_dict(self) -> dict[TaskKind, float]:
        return dict(self._means)

    def load_state_dict(self, state: Mapping[TaskKind, float]) -> None:
        self._means = dict(state)
