"""Target responses of recycled tasks, for learning them without sampling."""

from __future__ import annotations

import random
from collections.abc import Sequence

from spark_megatron.recycle.candidates import candidates
from spark_megatron.types import Group, Task


def with_targets(tasks: Sequence[Task], groups: Sequence[Group], rng: random.Random) -> list[tuple[Task, str]]:
    """Each task with the text to learn: the boxed verdict, or a right response of the group it was made from.

    A reflection on a group without a right response has no target and is left out. Raises ValueError for a
    reflection whose group is not among ``groups``, or for a task of kind "solve".
    """
    right: dict[str, list[str]] = {}
    for group in groups:
        right.setdefault(group.task.id, []).extend(candidate.text for candidate in candidates(group)[0])
    pairs = []
    for task in tasks:
        if task.kind == "solve":
            raise ValueError(f"task {task.id}: a task of kind 'solve' has no supervised target")
        if task.kind != "reflect":
            pairs.append((task, f"\\boxed{{{task.answer}}}"))
        elif task.source not in right:
            raise ValueError(f"task {task.id}: its group {task.source!r} is not among the groups given")
        elif right[task.source]:
            pairs.append((task, rng.choice(right[task.source])))
    return pairs
