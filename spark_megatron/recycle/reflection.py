"""Tasks to reconsider a solution and to answer the question again."""

from __future__ import annotations

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.items import recycled
from spark_megatron.recycle.templates import Template, View
from spark_megatron.types import Task


def reflection_task(source: Task, candidate: Candidate, *, template: Template, view: View) -> Task:
    """Shows ``candidate`` and asks ``source`` again; gold answer and verifier are the source's.

    SPARK (arXiv 2509.22624), the reflection part of section 3.2. Raises ValueError for a wording that calls a right
    candidate wrong.
    """
    if template.told_wrong and candidate.right:
        raise ValueError(f"task {source.id}: a right solution would be called wrong: {template.text[:80]!r}")
    return recycled(
        source,
        "reflect",
        prompt=template.prompt({"question": source.question, "shown": template.show(candidate, view)}),
        answer=source.answer,
        verifier=source.verifier,
        shown=(candidate.shown,),
    )
