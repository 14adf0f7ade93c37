"""Aggregation by count: per kind, over ranks, with masked rollouts."""

import math
from collections import Counter
from collections.abc import Callable

import pytest

from spark_megatron.tracking.metrics import from_sums, group_sums, weighted_mean
from spark_megatron.types import Group, Verdict

EARNED = {"unparsed": 0.0, "truncated": 0.0, "timeout": None, "error": None}
RIGHT, WRONG = Verdict("ok", 1.0, "2"), Verdict("ok", 0.0, "3")
MakeGroup = Callable[..., Group]


def test_weighted_mean_by_hand() -> None:
    assert weighted_mean([(1.0, 1), (4.0, 3)]) == 3.25
    assert weighted_mean([(math.nan, 0), (2.0, 5)]) == 2.0
    assert math.isnan(weighted_mean([]))


def test_one_kind_by_hand(make_group: MakeGroup) -> None:
    groups = [
        make_group([RIGHT, WRONG, Verdict("unparsed"), Verdict("timeout")], tokens=[(1,), (1, 2), (1, 2), (1, 2, 3)]),
        make_group([RIGHT, RIGHT], tokens=[(5,), (5,)]),
    ]
    metrics = from_sums(group_sums(groups, earned=EARNED))
    assert metrics["reward/solve"] == 3 / 5  # the timeout is masked, the unparsed one earns 0
    assert metrics["length/solve"] == 10 / 6
    assert metrics["tokens/generated"] == 10
    assert metrics["groups/flat_share"] == 0.5
    assert metrics["groups/distinct_share"] == (3 / 4 + 1 / 2) / 2
    statuses = {name: value for name, value in metrics.items() if name.startswith("status/")}
    assert statuses == {
        "status/solve/ok": 4,
        "status/solve/unparsed": 1,
        "status/solve/truncated": 0,
        "status/solve/timeout": 1,
        "status/solve/error": 0,
    }


def test_what_a_status_earns_is_a_setting(make_group: MakeGroup) -> None:
    groups = [make_group([RIGHT, Verdict("unparsed"), Verdict("unparsed"), WRONG])]
    penalised = from_sums(group_sums(groups, earned={**EARNED, "unparsed": -0.5}))
    masked = from_sums(group_sums(groups, earned={**EARNED, "unparsed": None}))
    assert penalised["reward/solve"] == 0.0
    assert masked["reward/solve"] == 0.5


def test_kinds_do_not_mix_and_absent_kinds_are_absent(make_group: MakeGroup) -> None:
    groups = [make_group([RIGHT, WRONG]), make_group([RIGHT, RIGHT], kind="judge_one")]
    metrics = from_sums(group_sums(groups, earned=EARNED))
    assert (metrics["reward/solve"], metrics["reward/judge_one"]) == (0.5, 1.0)
    assert not [name for name in metrics if "judge_pair" in name or "reflect" in name]


def test_adding_the_sums_of_ranks_equals_one_rank_with_everything(make_group: MakeGroup) -> None:
    one = [make_group([RIGHT] * 3)]
    other = [make_group([WRONG]), make_group([RIGHT, WRONG], kind="reflect")]
    added: Counter[str] = Counter()
    for part in (one, other):
        added.update(group_sums(part, earned=EARNED))
    assert from_sums(added) == from_sums(group_sums(one + other, earned=EARNED))


def test_names_are_the_same_on_a_rank_without_groups(make_group: MakeGroup) -> None:
    assert group_sums([], earned=EARNED).keys() == group_sums([make_group([RIGHT])], earned=EARNED).keys()
    assert from_sums(group_sums([], earned=EARNED)) == {"tokens/generated": 0.0}


def test_a_group_with_everything_masked_is_flat_and_has_no_reward(make_group: MakeGroup) -> None:
    metrics = from_sums(group_sums([make_group([Verdict("error"), Verdict("timeout")])], earned=EARNED))
    assert "reward/solve" not in metrics
    assert metrics["groups/flat_share"] == 1.0


def test_refuses_an_unchecked_group(make_group: MakeGroup) -> None:
    unchecked = make_group([], tokens=[(1,)])
    with pytest.raises(ValueError, match="1 rollouts and 0 verdicts"):
        group_sums([unchecked], earned=EARNED)
