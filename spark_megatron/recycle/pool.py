"""Recycled tasks that wait for their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from spark_megatron.types import Task


class Pool:
    """First in, first out; when it would hold more than ``max_size`` tasks (None: no limit), the oldest go."""

    def __init__(self, *, max_size: int | None) -> None:
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size={max_size}: must be at least 1, or null for no limit")
        self._tasks: deque[Task] = deque(maxlen=max_size)

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, tasks: Iterable[Task]) -> None:
        """Appends the tasks in their order."""
        self._tasks.extend(tasks)

    def take(self, n: int) -> list[Task]:
        """Removes and returns the ``n`` oldest tasks; raises ValueError when there are fewer."""
        if n > len(self._tasks):
            raise ValueError(f"{n} tasks asked of a pool of {len(self._tasks)}: look at len(pool) first")
        return [self._tasks.popleft() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """Plain data (dicts, lists, strings) from which ``load_state_dict`` restores the pool."""
        return {"tasks": [asdict(task) for task in self._tasks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the content; of more than ``max_size`` tasks the newest stay."""
        self._tasks.clear()
        self.add(Task(**{name: _tuples(value) for name, value in fields.items()}) for fields in state["tasks"])


def _tuples(value: Any) -> Any:
    """Tuples for the lists that JSON makes of them."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
