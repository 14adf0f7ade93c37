"""Tasks to judge which of two solutions is right."""

from __future__ import annotations

import re
from fractions import Fraction

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.items import recycled
from spark_megatron.recycle.templates import Template, View
from spark_megatron.rewards.math import normalise
from spark_megatron.types import Task

_FRAC = re.compile(r"([+-]?)(?:(\d{1,30}) ?)?\\frac ?\{?(-?\d{1,30})\}? ?\{?(\d{1,30})\}?", re.ASCII)
_MIXED = re.compile(r"([+-]?)(?:(\d{1,30}) )?(\d{1,30}) ?/ ?(\d{1,30})", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d{1,30}\.?\d{0,30}|\.\d{1,30})(?:[eE][+-]?\d{1,3})?", re.ASCII)


def same_answer(one: Candidate, other: Candidate) -> bool:
    r"""Whether the two show the same final answer: up to typography, case, and the form of a number.

    Exact and without a clock, since every rank of a job has to find the same: ``0.5``, ``1/2`` and ``\frac{1}{2}`` are
    the same, ``1 \frac{1}{2}`` is ``1.5``. Of other expressions the verifier of the task has said already that one
    equals the gold answer and the other does not.
    """
    left, right = (normalise(candidate.answer or "") for candidate in (one, other))
    if left.casefold() == right.casefold():
        return True
    value = _value(left)
    return value is not None and value == _value(right)


def _value(answer: str) -> Fraction | None:
    """The value of a decimal number, a fraction of whole numbers or a mixed number; None for anything else."""
    if _DECIMAL.fullmatch(answer):
        return Fraction(answer)
    found = _FRAC.fullmatch(answer) or _MIXED.fullmatch(answer)
    if found is None or not int(found[4]):
        return None
    size = int(found[2] or 0) + Fraction(int(found[3]), int(found[4]))
    return -size if found[1] == "-" else size


def pairwise_task(
    source: Task, first: Candidate, second: Candidate, *, template: Template, view: View, verifier: str
) -> Task:
    """Asks which of the two, shown in this order, solves ``source``; exactly one of them must be right.

    SPARK (arXiv 2509.22624), the pairwise part of section 3.2. Raises ValueError for two equal answers or verdicts.
    """
    if same_answer(first, second):
        raise ValueError(f"task {source.id}: a pair needs two different answers, both are {first.answer!r}")
    if first.right == second.right:
        raise ValueError(f"task {source.id}: a pair needs one right and one wrong solution")
    shown = {"a": template.show(first, view), "b": template.show(second, view)}
    return recycled(
        source,
        "judge_pair",
        prompt=template.prompt({"question": source.question, **shown}),
        answer=template.labels[0 if first.right else 1],
        verifier=verifier,
        shown=(first.shown, second.shown),
        labels=template.labels,
    )
