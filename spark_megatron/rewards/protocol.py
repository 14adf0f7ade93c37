"""What every verifier offers, and the verdict of a response without an answer."""

from __future__ import annotations

from typing import Protocol

from spark_megatron.rewards.boxed import last_boxed
from spark_megatron.types import Task, Verdict


class Verifier(Protocol):
    """Checks one response against the task's gold answer.

    ``finish`` is the rollout's finish reason, "stop" or "length".
    """

    def __call__(self, task: Task, response: str, finish: str) -> Verdict: ...


def read_box(response: str, finish: str) -> str | Verdict:
    """The last box's content, or the status of a response that has no (or an empty) box."""
    content = last_boxed(response)
    if content:
        return content
    return Verdict("truncated" if finish == "length" and content is None else "unparsed")
