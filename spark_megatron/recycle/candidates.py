"""The rollouts of a checked group that can be shown in a new task."""

from __future__ import annotations

from dataclasses import dataclass

from spark_megatron.types import Group


@dataclass(frozen=True)
class Candidate:
    """A solution to show: its whole text, its final answer (None where none could be read) and whether it is right."""

    text: str
    answer: str | None
    right: bool

    @property
    def shown(self) -> str:
        """What tells this candidate from others: its answer, or its text where that has none."""
        return self.text if self.answer is None else self.answer


def candidates(group: Group) -> tuple[list[Candidate], list[Candidate]]:
    """The right and the wrong rollouts of a checked group.

    Right is a verdict ``ok`` with reward 1, wrong one with reward 0, or ``unparsed`` or ``truncated``. Partial rewards
    and checks that did not end (``timeout``, ``error``) say neither, so those rollouts are left out.
    """
    if len(group.verdicts) != len(group.rollouts):
        raise ValueError(f"task {group.task.id}: {len(group.rollouts)} rollouts but {len(group.verdicts)} verdicts")
    right, wrong = [], []
    for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
        if verdict.status == "ok" and verdict.reward == 1.0:
            right.append(Candidate(rollout.text, verdict.parsed, True))
        elif verdict.status in ("unparsed", "truncated") or (verdict.status == "ok" and verdict.reward == 0.0):
            wrong.append(Candidate(rollout.text, verdict.parsed, False))
    return right, wrong


def answered(options: list[Candidate]) -> list[Candidate]:
    """Those whose final answer could be read."""
    return [option for option in options if option.answer is not None]
