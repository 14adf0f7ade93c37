"""Tasks to judge one solution."""

from __future__ import annotations

import random

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.items import recycled
from spark_megatron.recycle.templates import Part, View, fill
from spark_megatron.types import Task


def pointwise_task(
    source: Task, candidate: Candidate, *, part: Part, view: View, verifier: str, rng: random.Random
) -> Task:
    """Asks whether ``candidate`` solves ``source``; the gold answer is the template's label for right or wrong.

    SPARK (arXiv 2509.22624), the pointwise part of section 3.2.
    """
    template = part.draw(rng)
    right, wrong = template.labels
    prompt = fill(template.text, {"question": source.question, "shown": part.show(candidate, view)})
    shown = (candidate.text if candidate.answer is None else candidate.answer,)
    answer = right if candidate.right else wrong
    return recycled(source, "judge_one", prompt=prompt, answer=answer, verifier=verifier, shown=shown)
