"""What a source of tasks offers, and how a question becomes a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spark_megatron.data.split import question_hash
from spark_megatron.recycle.templates import fill
from spark_megatron.types import Task, Turn


class TaskSource(Protocol):
    """Makes tasks of kind "solve"."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same key would give other tasks."""
        ...

    def tasks(self, key: str) -> list[Task]:
        """One pass of distinct tasks, in an order (and, for a generator, with a content) determined by ``key``."""
        ...


def check_instruction(instruction: str | None) -> None:
    """Raises ValueError unless the instruction has the field ``{question}``, or is None: the question alone."""
    if instruction is not None and "{question}" not in instruction:
        raise ValueError(f"instruction={instruction!r}: must contain {{question}}")


def solve_task(
    question: str, answer: str, *, instruction: str | None, verifier: str, context: Sequence[Turn] = ()
) -> Task:
    """The task to solve ``question``, after the turns of ``context``; equal questions have equal ids.

    Where earlier turns of a conversation belong to it, they are part of what a judge is shown as the question.
    """
    prompt = question if instruction is None else fill(instruction, {"question": question})
    earlier = [f"{role}: {text}" for role, text in context if role != "system"]
    whole = "\n\n".join([*earlier, f"user: {question}"]) if earlier else question
    return Task(question_hash(whole)[:16], "solve", prompt, answer, verifier, whole, context=tuple(context))


def distinct(tasks: list[Task]) -> list[Task]:
    """The first task of each question, in order."""
    first: dict[str, Task] = {}
    for task in tasks:
        first.setdefault(task.id, task)
    return list(first.values())
