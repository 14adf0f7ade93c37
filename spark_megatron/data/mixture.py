"""Several sources of tasks as one."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Mapping

from spark_megatron.data.sources import TaskSource, distinct
from spark_megatron.types import Task


class MixtureSource:
    """Tasks of named ``sources``, each with instruction, system prompt and verifier of its own.

    Without ``weights`` (null) a pass has every task of every source once. With them, a pass has as many tasks as all
    sources together, shared out by the weights of their names: of a source with more tasks than its share, another part
    comes in every pass; one with fewer goes round. A question that several sources have is taken from the first of
    them.
    """

    def __init__(self, *, sources: Mapping[str, TaskSource], weights: Mapping[str, float] | None) -> None:
        if not sources:
            raise ValueError("sources={}: name at least one")
        if weights is not None and set(weights) != set(sources):
            raise ValueError(f"weights={dict(weights)}: must name exactly the sources {sorted(sources)}")
        if weights is not None and not all(0 < weight < math.inf for weight in weights.values()):
            raise ValueError(f"weights={dict(weights)}: must be greater than 0; leave a source out to have none of it")
        self._sources = dict(sources)
        self._weights = None if weights is None else {name: float(weights[name]) for name in sources}

    @property
    def fingerprint(self) -> str:
        parts = [(name, source.fingerprint) for name, source in self._sources.items()]
        return hashlib.sha256(repr((parts, self._weights)).encode()).hexdigest()[:16]

    def tasks(self, key: str) -> list[Task]:
        """One pass, shuffled; without weights its tasks are distinct."""
        passes = {name: source.tasks(f"{key}/{name}/0") for name, source in self._sources.items()}
        owner = {task.id: name for name, tasks in reversed(passes.items()) for task in tasks}
        own = {name: [task for task in tasks if owner[task.id] == name] for name, tasks in passes.items()}
        mixed = [task for tasks in own.values() for task in tasks]
        if self._weights is not None:
            counts = shared_out(len(mixed), list(self._weights.values()))
            mixed = [
                task
                for name, count in zip(own, counts, strict=True)
                for task in itertools.islice(self._going_round(name, key, own[name], owner), count)
            ]
        random.Random(key).shuffle(mixed)
        return mixed if self._weights is not None else distinct(mixed)

    def _going_round(self, name: str, key: str, first: list[Task], owner: Mapping[str, str]) -> itertools.chain[Task]:
        if not first:
            raise ValueError(f"sources.{name}: all of its questions are also in sources before it")
        later = (self._sources[name].tasks(f"{key}/{name}/{number}") for number in itertools.count(1))
        return itertools.chain(first, (task for tasks in later for task in tasks if owner.get(task.id, name) == name))


def shared_out(total: int, weights: list[float]) -> list[int]:
    """``total`` as whole shares in proportion to ``weights`` (largest remainders; equal ones in order)."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda index: (shares[index] - exact[index], index))
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares
