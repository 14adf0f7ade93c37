"""The best and the worst recorded rollouts of each task kind, found in one pass over a file of any length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PER_END = 2


@dataclass(frozen=True)
class Example:
    """One rollout with its task, as recorded."""

    step: int
    prompt: str
    answer: str
    text: str
    reward: float
    status: str
    parsed: str | None
    length: int


@dataclass
class Examples:
    """The rollouts of one kind with the highest and with the lowest rewards; among equals, the latest."""

    best: list[Example] = field(default_factory=list)
    worst: list[Example] = field(default_factory=list)


def find_examples(rows: Iterable[Mapping[str, Any]], per_end: int = PER_END) -> dict[str, Examples]:
    """By task kind, ``per_end`` best and worst rollouts, each of another group. Nothing is listed at both ends."""
    found: dict[str, Examples] = {}
    for row in rows:
        if not row["rollouts"]:
            continue
        of_kind = found.setdefault(row["kind"], Examples())
        rollouts = [_example(row, rollout) for rollout in row["rollouts"]]
        of_kind.best = _top([*of_kind.best, max(rollouts, key=_reward)], per_end, sign=1)
        of_kind.worst = _top([*of_kind.worst, min(rollouts, key=_reward)], per_end, sign=-1)
    for of_kind in found.values():
        of_kind.worst = [example for example in of_kind.worst if example not in of_kind.best]
    return found


def _top(examples: list[Example], count: int, sign: int) -> list[Example]:
    return sorted(examples, key=lambda e: (sign * e.reward, e.step), reverse=True)[:count]


def _reward(example: Example) -> float:
    return example.reward


def _example(row: Mapping[str, Any], rollout: Mapping[str, Any]) -> Example:
    return Example(
        step=row["step"],
        prompt=row["prompt"],
        answer=row["answer"],
        text=rollout["text"],
        reward=rollout["reward"] if rollout["reward"] is not None else 0.0,
        status=rollout["status"],
        parsed=rollout["parsed"],
        length=rollout["length"],
    )
