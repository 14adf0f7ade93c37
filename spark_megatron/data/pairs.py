"""Pairs of a right and a wrong response to one task (Cooper, arXiv 2508.05613, section on updating the reward model).

A rule verifier is precise and misses much: what it calls right is right, what it calls wrong may be right in another
form. So its "right" chooses the positive, and a negative is made from that one, never taken from the rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spark_megatron.data.assistants import Ask, Assistant, Original
from spark_megatron.types import Group, Task, Verdict

Check = Callable[[Sequence[tuple[Task, str]]], Sequence[Verdict]]
"""The rule's verdicts on (task, response), the same on every rank."""


@dataclass(frozen=True)
class Pair:
    """A right response to a task and a corruption of it that the rule calls wrong."""

    task: Task
    right: str
    wrong: str


def originals(groups: Sequence[Group]) -> list[Original]:
    """The first rollout of each checked group that the rule calls right; a group without one gives none."""
    found = []
    for group in groups:
        texts = [r.text for r, v in zip(group.rollouts, group.verdicts, strict=True) if right(v)]
        found += [Original(group.task, text) for text in texts[:1]]
    return found


def right(verdict: Verdict) -> bool:
    return verdict.status == "ok" and verdict.reward == 1.0


def refuted(verdict: Verdict) -> bool:
    """Whether the rule read an answer and it is not the gold one."""
    return verdict.status == "ok" and verdict.reward == 0.0


def make_pairs(
    given: Sequence[Original], assistant: Assistant, check: Check, ask: Ask, *, tries: int, seed: tuple[object, ...]
) -> list[Pair]:
    """The originals that could be corrupted, in order, each with its corruption. A collective.

    A corruption counts once the rule refutes it against the task's gold answer. One that it cannot read, or that is
    still right, is asked for again, ``tries`` times in all; then the original is left out.
    """
    wrong: dict[int, str] = {}
    for attempt in range(tries):
        left = [i for i in range(len(given)) if i not in wrong]
        if not left:
            break
        texts = assistant([given[i] for i in left], (*seed, attempt), ask)
        made = [(i, text) for i, text in zip(left, texts, strict=True) if text]
        verdicts = check([(given[i].task, text) for i, text in made])
        wrong |= {i: text for (i, text), verdict in zip(made, verdicts, strict=True) if refuted(verdict)}
    return [Pair(given[i].task, given[i].text, wrong[i]) for i in sorted(wrong)]
