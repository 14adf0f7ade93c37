"""What all recycled tasks share."""

from __future__ import annotations

import hashlib

from spark_megatron.types import Task, TaskKind


def recycled(
    source: Task,
    kind: TaskKind,
    *,
    prompt: str,
    answer: str,
    verifier: str,
    shown: tuple[str, ...],
    labels: tuple[str, ...] = (),
) -> Task:
    """A task made from ``source``. Its id is a hash of what it asks, so that equal items have equal ids."""
    digest = hashlib.sha256(f"{prompt}\0{answer}".encode()).hexdigest()[:12]
    name = f"{source.id}/{kind}/{digest}"
    return Task(name, kind, prompt, answer, verifier, source.question, source.id, shown, labels)
