"""Tasks to judge which of two solutions is right."""

from __future__ import annotations

import random

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.items import recycled
from spark_megatron.recycle.templates import Part, View, fill
from spark_megatron.rewards.math import normalise
from spark_megatron.types import Task


def same_answer(one: Candidate, other: Candidate) -> bool:
    """Whether the two show the same final answer, up to typography."""
    return normalise(one.answer or "") == normalise(other.answer or "")


def pairwise_task(
    source: Task, first: Candidate, second: Candidate, *, part: Part, view: View, verifier: str, rng: random.Random
) -> Task:
    """Asks which of the two, shown in this order, solves ``source``; exactly one of them must be right.

    SPARK (arXiv 2509.22624), the pairwise part of section 3.2. Raises ValueError for two equal answers or verdicts.
    """
    if same_answer(first, second):
        raise ValueError(f"task {source.id}: a pair needs two different answers, both are {first.answer!r}")
    if first.right == second.right:
        raise ValueError(f"task {source.id}: a pair needs one right and one wrong solution")
    template = part.draw(rng)
    fields = {"question": source.question, "a": part.show(first, view), "b": part.show(second, view)}
    return recycled(
        source,
        "judge_pair",
        prompt=fill(template.text, fields),
        answer=template.labels[0 if first.right else 1],
        verifier=verifier,
        shown=(first.answer or first.text, second.answer or second.text),
    )
