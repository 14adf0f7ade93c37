"""The endless stream of training tasks, and the held-out ones."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from spark_megatron.data.curriculum import Order
from spark_megatron.data.sources import TaskSource
from spark_megatron.data.split import is_heldout
from spark_megatron.types import Metrics, Task

_LOG = logging.getLogger(__name__)
_DRAWS_PER_EXPECTED = 20
"""Held-out items are given up on after this many times the draws that a source without repetitions would need."""
_SHOWN = 5
"""How many questions a message lists."""


class TaskStream:
    """Training tasks of ``source``, pass after pass, the same for the same ``seed``, in the order of ``order``.

    Held-out tasks come from ``heldout_source``, or are ``heldout_share`` of all questions where that is None; they
    depend on neither ``seed`` nor position, so that runs of different seeds are measured on the same ones. Training
    tasks never ask a question that is held out. ``limit`` (None: no limit) shortens or leaves out prompts.

    Every rank has the whole stream: how many there are changes nothing.
    """

    def __init__(
        self,
        *,
        source: TaskSource,
        seed: int,
        heldout_share: float,
        order: Order,
        heldout_source: TaskSource | None = None,
        limit: Callable[[Task], Task | None] | None = None,
    ) -> None:
        if not 0.0 <= heldout_share < 1.0:
            raise ValueError(f"heldout_share={heldout_share}: must lie in [0, 1)")
        self._source, self._seed, self._share, self._order, self._limit = source, seed, heldout_share, order, limit
        self._heldout = None if heldout_source is None else heldout_source.tasks("heldout/0")
        self._heldout_ids = {task.id for task in self._heldout or ()}
        self._heldout_print = "" if heldout_source is None else f"/{heldout_source.fingerprint}"
        self._epoch, self._position = 0, 0
        self._dropped, self._cut = 0, 0
        self._tasks = self._pass(0)
        self._report_overlap()

    def take(self, n: int) -> list[Task]:
        """The next ``n`` tasks, crossing into the next pass where one ends."""
        taken: list[Task] = []
        fruitless = 0
        while len(taken) < n:
            if self._position >= len(self._tasks):
                self._epoch, self._position = self._epoch + 1, 0
                self._tasks = self._pass(self._epoch)
            wanted = min(n - len(taken), len(self._tasks) - self._position)
            rng = random.Random(f"{self._seed}/{self._epoch}/{self._position}")
            part = self._order.choose(self._tasks, self._position, wanted, rng)
            self._position += len(part)
            fitting = self._fitting(part)
            taken += fitting
            fruitless = 0 if fitting else fruitless + len(part)
            if fruitless > 2 * len(self._tasks):
                raise ValueError(
                    f"{fruitless} prompts one after the other were too long: raise data.max_prompt_tokens, or look at "
                    "the system prompt and the instruction, which count too"
                )
        return taken

    def observe(self, accuracy: Mapping[str, float]) -> None:
        """Tells ``order`` how often tasks of the stream were solved, by id."""
        self._order.observe(accuracy)

    def metrics(self) -> Metrics:
        """Passes that were begun, and how many prompts were too long so far."""
        return {
            "data/epoch": self._epoch + self._position / len(self._tasks),
            "data/overlong_dropped": float(self._dropped),
            "data/overlong_cut": float(self._cut),
        }

    def heldout(self, n: int) -> list[Task]:
        """``n`` distinct held-out tasks, always the same; raises ValueError when the source has too few."""
        if self._heldout is not None:
            if len(self._heldout) < n:
                raise ValueError(f"{n} held-out tasks asked, but data.heldout has {len(self._heldout)}: ask for fewer")
            return self._heldout[:n]
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
        return {
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self._fingerprint(),
            "overlong": [self._dropped, self._cut],
            "order": self._order.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken; on another source, seed or share it starts anew and warns."""
        if state["fingerprint"] != self._fingerprint():
            _LOG.warning("the tasks or their seed changed since this state was saved: the stream starts anew")
            self._epoch, self._position, self._dropped, self._cut = 0, 0, 0, 0
        else:
            self._epoch, self._position = state["epoch"], state["position"]
            self._dropped, self._cut = state.get("overlong", (0, 0))  # older checkpoints have neither this
            self._order.load_state_dict(state.get("order", {}))  # nor this
        self._tasks = self._pass(self._epoch)

    def _fitting(self, tasks: list[Task]) -> list[Task]:
        if self._limit is None:
            return tasks
        pairs = [(task, self._limit(task)) for task in tasks]
        fitting = [short for _, short in pairs if short is not None]
        self._dropped += len(pairs) - len(fitting)
        self._cut += sum(short is not None and short is not task for task, short in pairs)
        return fitting

    def _pass(self, epoch: int) -> list[Task]:
        tasks = self._source.tasks(f"train/{self._seed}/{epoch}")
        kept = [task for task in tasks if not self._is_heldout(task)]
        if not kept:
            where = f"heldout_share={self._share}" if self._heldout is None else "data.heldout"
            raise ValueError(f"{where} leaves none of the {len(tasks)} tasks of a pass to train on")
        return kept

    def _is_heldout(self, task: Task) -> bool:
        return task.id in self._heldout_ids or is_heldout(task.question, self._share)

    def _report_overlap(self) -> None:
        if self._heldout is None:
            return
        tasks = self._source.tasks(f"train/{self._seed}/0")
        shared = [task.question for task in tasks if task.id in self._heldout_ids]
        if shared:
            shown = ", ".join(repr(question[:80]) for question in shared[:_SHOWN])
            _LOG.warning(
                "%d of %d training tasks ask held-out questions and are left out: %s", len(shared), len(tasks), shown
            )

    def _fingerprint(self) -> str:
        return f"{self._source.fingerprint}/{self._seed}/{self._share}{self._heldout_print}"
