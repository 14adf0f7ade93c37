"""Tasks to judge one solution."""

from __future__ import annotations

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.items import recycled
from spark_megatron.recycle.templates import Template, View
from spark_megatron.types import Task


def pointwise_task(source: Task, candidate: Candidate, *, template: Template, view: View, verifier: str) -> Task:
    """Asks whether ``candidate`` solves ``source``; the gold answer is the template's label for right or wrong.

    SPARK (arXiv 2509.22624), the pointwise part of section 3.2.
    """
    right, wrong = template.labels
    return recycled(
        source,
        "judge_one",
        prompt=template.prompt({"question": source.question, "shown": template.show(candidate, view)}),
        answer=right if candidate.right else wrong,
        verifier=verifier,
        shown=(candidate.shown,),
        labels=template.labels,
    )
