"""From the groups of a step to named numbers, exact over any number of ranks: sums first, means last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import get_args

from spark_megatron.types import TASK_KINDS, Group, Metrics, Status

STATUSES: tuple[Status, ...] = get_args(Status)
_SUM, _COUNT, _TOTAL = "#sum", "#count", "#total"


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float:
    """The mean of (value, count) pairs, NaN where the counts add up to 0. Pairs of count 0 are ignored, NaN or not."""
    total = count = 0.0
    for value, weight in pairs:
        if weight:
            total += value * weight
            count += weight
    return total / count if count else math.nan


def group_sums(groups: Iterable[Group], *, earned: Mapping[Status, float | None]) -> dict[str, float]:
    """Sums and counts over this rank's checked groups, under the same names on every rank, whatever was sampled.

    Add the results of all ranks name by name, then call ``from_sums``. ``earned`` is what a status other than ``ok``
    earns in training; None masks the rollout: it counts as a status, not as a reward.
    Raises ValueError for a group that was not checked.
    """
    sums = dict.fromkeys(_sum_names(), 0.0)

    def add(name: str, value: float, count: float = 1.0) -> None:
        sums[name + _SUM] += value
        sums[name + _COUNT] += count

    for group in groups:
        kind = group.task.kind
        if len(group.verdicts) != len(group.rollouts):
            raise ValueError(
                f"group {group.task.id!r} has {len(group.rollouts)} rollouts and {len(group.verdicts)} verdicts; "
                "check the responses before counting them"
            )
        rewards = [v.reward if v.status == "ok" else earned[v.status] for v in group.verdicts]
        trained = [r for r in rewards if r is not None]
        add(f"reward/{kind}", sum(trained), len(trained))
        for verdict in group.verdicts:
            sums[f"status/{kind}/{verdict.status}{_TOTAL}"] += 1
        lengths = [len(r.tokens) for r in group.rollouts]
        add(f"length/{kind}", sum(lengths), len(lengths))
        sums["tokens/generated" + _TOTAL] += sum(lengths)
        add("groups/flat_share", float(len(set(trained)) <= 1))
        if group.rollouts:
            add("groups/distinct_share", len({r.tokens for r in group.rollouts}) / len(group.rollouts))
    return sums


def from_sums(sums: Mapping[str, float]) -> Metrics:
    """Means and totals from (added up) ``group_sums``. Without a count there is no mean, without rollouts no status."""
    metrics: Metrics = {}
    for name, value in sums.items():
        if name.endswith(_SUM):
            count = sums[name.removesuffix(_SUM) + _COUNT]
            if count:
                metrics[name.removesuffix(_SUM)] = value / count
        elif name.endswith(_TOTAL):
            kind = name.split("/")[1]
            if not name.startswith("status/") or sums[f"length/{kind}{_COUNT}"]:
                metrics[name.removesuffix(_TOTAL)] = value
    return metrics


def _sum_names() -> list[str]:
    means = [f"{name}/{kind}" for name in ("reward", "length") for kind in TASK_KINDS]
    means += ["groups/flat_share", "groups/distinct_share"]
    totals = [f"status/{kind}/{status}" for kind in TASK_KINDS for status in STATUSES] + ["tokens/generated"]
    return [name + part for name in means for part in (_SUM, _COUNT)] + [name + _TOTAL for name in totals]
