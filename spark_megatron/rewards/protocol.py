"""What every verifier offers, and the verdict of a response without an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from spark_megatron.rewards.boxed import last_boxed
from spark_megatron.types import Task, Verdict


class Verifier(Protocol):
    """Checks one response against the task's gold answer.

    ``finish`` is the rollout's finish reason, "stop" or "length".
    """

    def __call__(self, task: Task, response: str, finish: str) -> Verdict: ...


@runtime_checkable
class GroupVerifier(Verifier, Protocol):
    """A verifier that can check all responses to a task together: several at once, or each in view of the others.

    ``responses`` are (text, finish reason) pairs; the verdicts come in their order.
    """

    def group(self, task: Task, responses: Sequence[tuple[str, str]]) -> list[Verdict]: ...


def read_box(response: str, finish: str) -> str | Verdict:
    """The last box's content, or the status of a response that has no (or an empty) box."""
    content = last_boxed(response)
    if content:
        return content
    return Verdict("truncated" if finish == "length" and content is None else "unparsed")
