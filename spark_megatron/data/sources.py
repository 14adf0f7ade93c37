"""What a source of tasks offers, and how a question becomes a task."""

from __future__ import annotations

from typing import Protocol

from spark_megatron.data.split import question_hash
from spark_megatron.recycle.templates import fill
from spark_megatron.types import Task


class TaskSource(Protocol):
    """Makes tasks of kind "solve"."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same key would give other tasks."""
        ...

    def tasks(self, key: str) -> list[Task]:
        """One pass of distinct tasks, in an order (and, for a generator, with a content) determined by ``key``."""
        ...


def check_instruction(instruction: str) -> None:
    """Raises ValueError unless the instruction has the field ``{question}``."""
    if "{question}" not in instruction:
        raise ValueError(f"instruction={instruction!r}: must contain {{question}}")


def solve_task(question: str, answer: str, *, instruction: str, verifier: str) -> Task:
    """The task to solve ``question``; equal questions have equal ids."""
    prompt = fill(instruction, {"question": question})
    return Task(question_hash(question)[:16], "solve", prompt, answer, verifier, question)


def distinct(tasks: list[Task]) -> list[Task]:
    """The first task of each question, in order."""
    first: dict[str, Task] = {}
    for task in tasks:
        first.setdefault(task.id, task)
    return list(first.values())
