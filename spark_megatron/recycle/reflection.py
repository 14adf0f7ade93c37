"""Tasks to reconsider a solution and to answer the question again."""

from __future__ import annotations

import random

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.items import recycled
from spark_megatron.recycle.templates import Part, View, fill
from spark_megatron.types import Task


def reflection_task(source: Task, candidate: Candidate, *, part: Part, view: View, rng: random.Random) -> Task:
    """Shows ``candidate`` and asks ``source`` again; gold answer and verifier are the source's.

    SPARK (arXiv 2509.22624), the reflection part of section 3.2. Wordings that call the solution wrong are drawn for
    wrong ones only.
    """
    template = part.draw(rng, allow_told_wrong=not candidate.right)
    prompt = fill(template.text, {"question": source.question, "shown": part.show(candidate, view)})
    shown = (candidate.text if candidate.answer is None else candidate.answer,)
    return recycled(source, "reflect", prompt=prompt, answer=source.answer, verifier=source.verifier, shown=shown)
