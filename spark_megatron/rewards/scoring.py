"""Scoring of groups, and what the verdicts are worth in training."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from spark_megatron.rewards.protocol import Verifier
from spark_megatron.types import Group, Rollout, Status, Task, Verdict

STATUSES: tuple[Status, ...] = get_args(Status)


def score_groups(groups: Sequence[Group], verifiers: Mapping[str, Verifier]) -> list[Group]:
    """The groups with one verdict per rollout, each from the verifier that the group's task names.

    Raises ValueError for an unknown verifier's name; a failing verifier's error is raised with the task's id.
    """
    return [replace(group, verdicts=_check(group, _find(group.task.verifier, verifiers))) for group in groups]


def verdict_of(verifiers: Mapping[str, Verifier], task: Task, response: str) -> Verdict:
    """The verdict of a finished response, from the verifier that its task names; errors as in ``score_groups``."""
    rollout = Rollout((), (), response, "stop", -1)
    [verdict] = _check(Group(task, (), (rollout,)), _find(task.verifier, verifiers))
    return verdict


def training_rewards(group: Group, table: Mapping[Status, float | None]) -> tuple[float | None, ...]:
    """The reward of each rollout in training: the verdict's own where it is ``ok``, else what ``table`` gives.

    None means masked out: the rollout takes no part in its group's statistics or in the loss.
    """
    if len(group.verdicts) != len(group.rollouts):
        raise ValueError(f"task {group.task.id}: {len(group.rollouts)} rollouts but {len(group.verdicts)} verdicts")
    missing = [status for status in STATUSES if status != "ok" and status not in table]
    if missing or "ok" in table:
        raise ValueError(f"reward_table={dict(table)}: give a number or null for every status but 'ok', {missing=}")
    return tuple(v.reward if v.status == "ok" else table[v.status] for v in group.verdicts)


def solved_shares(groups: Iterable[Group]) -> dict[str, float]:
    """The mean reward of each task's rollouts by the task's id; a check that failed by itself says nothing."""
    checked = {group.task.id: [v.reward for v in group.verdicts if v.status != "error"] for group in groups}
    return {task: sum(rewards) / len(rewards) for task, rewards in checked.items() if rewards}


def status_counts(groups: Iterable[Group]) -> dict[Status, int]:
    """The number of verdicts per status; every status is a key."""
    counts = dict.fromkeys(STATUSES, 0)
    for group in groups:
        for verdict in group.verdicts:
            counts[verdict.status] += 1
    return counts


def _find(name: str, verifiers: Mapping[str, Verifier]) -> Verifier:
    if name in verifiers:
        return verifiers[name]
    near = difflib.get_close_matches(name, verifiers, n=1, cutoff=0.0)
    raise ValueError(f"unknown verifier {name!r}; nearest of {sorted(verifiers)}: {near[0] if near else None!r}")


def _check(group: Group, verifier: Verifier) -> tuple[Verdict, ...]:
    verdicts = []
    for rollout in group.rollouts:
        try:
            verdict = verifier(group.task, rollout.text, rollout.finish)
        except Exception as error:
            raise RuntimeError(f"verifier {group.task.verifier!r} failed on task {group.task.id}: {error}") from error
        if not (math.isfinite(verdict.reward) and 0.0 <= verdict.reward <= (1.0 if verdict.status == "ok" else 0.0)):
            raise ValueError(f"verifier {group.task.verifier!r} gave {verdict} on task {group.task.id}: not in [0, 1]")
        verdicts.append(verdict)
    return tuple(verdicts)
