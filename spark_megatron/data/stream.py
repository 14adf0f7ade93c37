"""The endless stream of training tasks, and the held-out ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spark_megatron.data.sources import TaskSource
from spark_megatron.data.split import is_heldout
from spark_megatron.types import Task

_LOG = logging.getLogger(__name__)
_DRAWS_PER_EXPECTED = 20
"""Held-out items are given up on after this many times the draws that a source without repetitions would need."""


class TaskStream:
    """Training tasks of ``source``, pass after pass, the same for the same ``seed``.

    ``heldout_share`` of all questions never appears in it. The held-out tasks depend on neither ``seed`` nor position,
    so that runs of different seeds are measured on the same ones.
    """

    def __init__(self, *, source: TaskSource, seed: int, heldout_share: float) -> None:
        if not 0.0 <= heldout_share < 1.0:
            raise ValueError(f"heldout_share={heldout_share}: must lie in [0, 1)")
        self._source, self._seed, self._share = source, seed, heldout_share
        self._epoch, self._position = 0, 0
        self._tasks = self._pass(0)

    def take(self, n: int) -> list[Task]:
        """The next ``n`` tasks, crossing into the next pass where one ends."""
        taken: list[Task] = []
        while len(taken) < n:
            if self._position == len(self._tasks):
                self._epoch, self._position = self._epoch + 1, 0
                self._tasks = self._pass(self._epoch)
            part = self._tasks[self._position : self._position + n - len(taken)]
            self._position += len(part)
            taken += part
        return taken

    def heldout(self, n: int) -> list[Task]:
        """``n`` distinct held-out tasks, always the same; raises ValueError when the source has too few."""
        found: dict[str, Task] = {}
        draws, index = 0, 0
        max_draws = _DRAWS_PER_EXPECTED * n / self._share if self._share else 0
        while len(found) < n and draws < max_draws:
            tasks = self._source.tasks(f"heldout/{index}")
            found.update({task.id: task for task in tasks if is_heldout(task.question, self._share)})
            draws, index = draws + len(tasks), index + 1
        if len(found) < n:
            raise ValueError(
                f"{n} held-out tasks asked, but the source delivers {len(found)} at heldout_share={self._share}: "
                "ask for fewer, raise the share, or widen the source"
            )
        return list(found.values())[:n]

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain data."""
        return {"epoch": self._epoch, "position": self._position, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken; on another source, seed or share it starts anew and warns."""
        same = state["fingerprint"] == self._fingerprint()
        if not same:
            _LOG.warning("the tasks or their seed changed since this state was saved: the stream starts anew")
        self._epoch, self._position = (state["epoch"], state["position"]) if same else (0, 0)
        self._tasks = self._pass(self._epoch)

    def _pass(self, epoch: int) -> list[Task]:
        tasks = self._source.tasks(f"train/{self._seed}/{epoch}")
        kept = [task for task in tasks if not is_heldout(task.question, self._share)]
        if not kept:
            raise ValueError(f"heldout_share={self._share} leaves none of the {len(tasks)} tasks of a pass to train on")
        return kept

    def _fingerprint(self) -> str:
        return f"{self._source.fingerprint}/{self._seed}/{self._share}"
