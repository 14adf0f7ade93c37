"""Labelled completions from which a reward model learns before any policy is trained with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spark_megatron.data.demonstrations import Demonstrator, candidate
from spark_megatron.data.jsonl import read_rows, text_field
from spark_megatron.data.sources import TaskSource
from spark_megatron.recycle.distractors import near_miss
from spark_megatron.types import Task


@dataclass(frozen=True)
class Triple:
    """A completion of a question whose right answer is ``reference``, and whether it is right."""

    question: str
    reference: str
    completion: str
    label: bool


class Triples(Protocol):
    """An endless sequence of triples, in parts."""

    def take(self, part: int, n: int, seed: int) -> Sequence[Triple]:
        """Part number ``part`` (from 0) of about ``n`` triples: the same for the same arguments."""
        ...


class TripleFile:
    """Triples of a file with one JSON object a line: question, reference_answer, completion and label (0 or 1).

    They are shuffled anew for each pass.
    """

    def __init__(self, *, path: str) -> None:
        self._triples = [_triple(row, where) for where, row in read_rows(path)]

    def take(self, part: int, n: int, seed: int) -> list[Triple]:
        places = range(part * n, (part + 1) * n)
        size = len(self._triples)
        orders = {p: random.Random(f"{seed}:{p}").sample(range(size), size) for p in {i // size for i in places}}
        return [self._triples[orders[i // size][i % size]] for i in places]


def _triple(row: Any, where: str) -> Triple:
    question, reference, completion = (
        text_field(row, field, where) for field in ("question", "reference_answer", "completion")
    )
    label = text_field(row, "label", where)
    if label not in ("0", "1"):
        raise ValueError(f"{where}: label={label}: must be 0 or 1")
    return Triple(question, reference, completion, label == "1")


class DemonstratedTriples:
    """Answers of a demonstrator to generated sums: a cold start for tiny models.

    Half of them are right; a quarter are the demonstrator's own, which may be wrong, and a quarter near misses.
    """

    def __init__(self, *, source: TaskSource, demonstrator: Demonstrator) -> None:
        self._source, self._demonstrator = source, demonstrator

    def take(self, part: int, n: int, seed: int) -> list[Triple]:
        """At most as many as a pass of the source has distinct tasks."""
        key = f"{seed}:triples/{part}"
        rng = random.Random(key)
        return [self._triple(task, rng) for task in self._source.tasks(key)[:n]]

    def _triple(self, task: Task, rng: random.Random) -> Triple:
        answer = task.answer
        if rng.random() < 0.5:
            own = str(self._demonstrator.running_values(task.question, rng)[-1])
            answer = rng.choice((own, near_miss(answer, rng)))
        return Triple(task.question, task.answer, candidate(task, answer, rng).text, answer == task.answer)
