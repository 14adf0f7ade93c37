"""How an evaluation asks a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spark_megatron.types import Group, Rollout, Task, Verdict

Sample = Callable[[Sequence[Task]], list[Group]]
"""Samples and checks responses to each task; none where the prompt leaves no room for one."""


def always_answered(sample: Sample) -> Sample:
    """``sample`` with a response to every task: one that ends before its first token where there was no room.

    That one is wrong, since nobody may skip an item.
    """

    def ask(tasks: Sequence[Task]) -> list[Group]:
        return [group if group.rollouts else _cut_off(group) for group in sample(tasks)]

    return ask


def _cut_off(group: Group) -> Group:
    return replace(group, rollouts=(Rollout((), (), "", "length", -1),), verdicts=(Verdict("truncated"),))
