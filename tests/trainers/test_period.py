"""One period of learning on real engines: what must be exact before the first step, and what the metrics mean."""

from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from spark_megatron.algos.mismatch import figures
from spark_megatron.types import Group, Rollout, Sample, Task, Verdict
from tests import distributed
from tests import training_rows as step
from tests.conftest import ModelDirectory
from tests.trainers.ranks_period import CORRECTED, ratios_of

LAYOUTS = ("dp2", "tp2", "pp2", "cp2")
NEAR = 1e-5
"""Relative; fp32 sums in other orders differ by about 1e-6."""


def group(verdicts: list[Verdict], kind: Any = "solve") -> Group:
    task = Task(id=kind, kind=kind, prompt="1+1?", answer="2", verifier="math", question="1+1?")
    rollouts = tuple(Rollout((i + 3,), (-1.0,), "", "stop", 0) for i in range(len(verdicts)))
    return Group(task, (1, 2), rollouts, tuple(verdicts))


RIGHT, WRONG, UNREADABLE, CUT = Verdict("ok", 1.0), Verdict("ok", 0.0), Verdict("unparsed"), Verdict("truncated")
GROUPS = [group([RIGHT, WRONG, CUT, UNREADABLE]), group([RIGHT, RIGHT]), group([WRONG, RIGHT], "judge_pair")]


@pytest.fixture(scope="module")
def ranks(model_directory: ModelDirectory, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = model_directory("qwen2")
    folder = tmp_path_factory.mktemp("period") / "job"
    return distributed.run(2, "tests.trainers.ranks_period:on_all_layouts", folder, path=path, groups=GROUPS)


def policy_rows() -> list[Sample]:
    return [row for row in step.samples() if row.loss == "policy_gradient"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_before_the_first_step_ratio_and_kl_are_exact(layout: str, ranks: list[dict[str, Any]]) -> None:
    """The policy is the one that sampled, and its own reference: not nearly 1 and 0, but 1 and 0."""
    for rank in ranks:
        first = rank[layout]["first"]
        assert first["first_ratio"] == 1.0
        assert first["first_kl"] == 0.0
        assert first["clip_frac"] == 0.0
        assert rank[layout]["two"]["first_ratio"] == 1.0
        assert rank[layout]["two"]["first_kl"] == 0.0
        assert rank[layout]["two"]["ratio_mean"] != 1.0, "the second step has left"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_loss_is_minus_the_mean_advantage_per_token(layout: str, ranks: list[dict[str, Any]]) -> None:
    """With a ratio of 1 and no KL: all tokens weigh the same, whatever their component."""
    rows = policy_rows()
    tokens = sum(len(row.response) for row in rows)
    expected = -sum(row.advantage * len(row.response) for row in rows) / tokens
    for rank in ranks:
        assert rank[layout]["first"]["loss"] == pytest.approx(expected, rel=NEAR)
        assert rank[layout]["first"]["tokens"] == tokens
        assert rank[layout]["two"]["tokens"] == tokens, "two steps share the rows"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mismatch_of_own_samples_is_rounding(layout: str, ranks: list[dict[str, Any]]) -> None:
    """The rows' log-probs are the trainer's own, computed in one pass over all of them."""
    for rank in ranks:
        found = figures(rank[layout]["first"])
        assert found["mean_abs"] <= found["max_abs"] < 1e-5
        assert found["ratio"] == pytest.approx(1, abs=1e-5)
        assert found["effective_share"] == pytest.approx(1, abs=1e-5)
        assert found["outside_share"] == 0.0
        assert rank[layout]["first"]["mismatch_tokens@0"] == sum(len(row.response) for row in policy_rows())


def test_all_layouts_and_ranks_report_the_same(ranks: list[dict[str, Any]]) -> None:
    expected = ranks[0]["dp2"]
    for rank in ranks:
        for layout in LAYOUTS:
            for period in ("first", "two", "joint", "without_reference"):
                # Left out is what is rounding of 0, and what only data ranks can have: an uneven share.
                own = ("mismatch_abs@0", "max_mismatch_abs@0", "mismatch_k3@0", "imbalance")
                found = {k: v for k, v in rank[layout][period].items() if k not in own}
                wanted = {k: v for k, v in expected[period].items() if k not in own}
                assert found == pytest.approx(wanted, rel=NEAR, abs=1e-7), (layout, period)


def test_the_spread_of_work_over_data_ranks_is_reported(ranks: list[dict[str, Any]]) -> None:
    """Rows of at most 30 tokens: no rank has more than one row above the mean of the two."""
    total = sum(len(row.prompt) + len(row.response) for row in policy_rows())
    for rank in ranks:
        assert 1 <= rank["dp2"]["first"]["imbalance"] <= 1 + 30 / total
        assert rank["tp2"]["first"]["imbalance"] == rank["pp2"]["first"]["imbalance"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollouts_of_other_weights_are_refused(layout: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[layout]["stale"] == (
            "rollouts of weights [0] were offered to weights 1, and at most objective.max_staleness=0 updates may lie "
            "between: sample again, or raise it"
        )
        assert rank[layout]["version"] == 3, "one step, a refusal, two steps"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_joint_period_counts_each_kind_of_loss_by_itself(layout: str, ranks: list[dict[str, Any]]) -> None:
    """The policy terms are their components' mean advantages (ratio 1), the rest is cross-entropy and KL."""
    rows = policy_rows()
    for rank in ranks:
        joint = rank[layout]["joint"]
        policy = 0.0
        for component in {row.component for row in rows}:
            part = [row for row in rows if row.component == component]
            mean = sum(row.advantage * len(row.response) for row in part) / sum(len(row.response) for row in part)
            policy -= step.WEIGHTS[component] * mean
        expected = policy + step.WEIGHTS["sft"] * joint["cross_entropy"] + step.KL_COEF * joint["kl"]
        assert joint["loss"] == pytest.approx(expected, rel=NEAR)
        assert joint["tokens"] == sum(len(row.response) for row in step.samples())


def test_without_a_reference_there_is_no_kl(ranks: list[dict[str, Any]]) -> None:
    metrics = ranks[0]["dp2"]["without_reference"]
    assert not {"kl", "first_kl"} & set(metrics)
    assert metrics["first_ratio"] == 1.0
    assert ranks[0]["dp2"]["two_without_reference"]["ratio_mean"] != 1.0, "the second step is measured from the first"


def weights_of(correction: str, ratios: list[float]) -> list[float]:
    """What the tokens of a row with these ratios count."""
    kept = 0.9 <= geometric_mean(ratios) <= 1.2
    return {
        "none": [1.0] * len(ratios),
        "truncated": [min(ratio, 2.0) for ratio in ratios],
        "icepop": [ratio if 0.5 <= ratio <= 5 else 0.0 for ratio in ratios],
        "sequence_mask": [ratio * kept for ratio in ratios],
    }[correction]


@pytest.mark.parametrize("correction", ["none", "truncated", "icepop", "sequence_mask"])
@pytest.mark.parametrize("layout", CORRECTED)
def test_a_corrected_loss_is_the_weighted_mean_over_all_tokens(
    layout: str, correction: str, ranks: list[dict[str, Any]]
) -> None:
    """With a ratio of 1 and no KL: - sum of w A over the number of all tokens, the rejected ones included."""
    rows = policy_rows()
    ratios = [ratio for i, row in enumerate(rows) for ratio in ratios_of(i, row)]
    weights = [weights_of(correction, ratios_of(i, row)) for i, row in enumerate(rows)]
    expected = -sum(row.advantage * sum(own) for row, own in zip(rows, weights, strict=True)) / len(ratios)
    flat = [weight for own in weights for weight in own]
    for rank in ranks:
        metrics = rank[layout]["corrected"][correction]
        found = figures(metrics)
        assert metrics["loss"] == pytest.approx(expected, rel=NEAR)
        assert metrics["tokens"] == len(ratios)
        assert metrics["first_ratio"] == pytest.approx(1, abs=1e-6)
        assert found["ratio"] == pytest.approx(sum(ratios) / len(ratios), rel=NEAR)
        effective = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
        assert found["effective_share"] == pytest.approx(effective, rel=NEAR)
        assert found["outside_share"] == sum(not 0.5 <= r <= 5 for r in ratios) / len(ratios)
        if correction == "none":
            assert not [name for name in found if name.startswith(("rejected", "truncated"))]
            continue
        assert found["rejected_share"] == flat.count(0.0) / len(ratios)
        truncated = sum(0 < weight < ratio for weight, ratio in zip(flat, ratios, strict=True))
        assert found["truncated_share"] == truncated / len(ratios)
        assert found["rejected_sequence_share"] == sum(not any(own) for own in weights) / len(rows)


@pytest.mark.parametrize("layout", CORRECTED)
def test_corrections_are_those_of_the_weights_that_sampled(layout: str, ranks: list[dict[str, Any]]) -> None:
    """A second step has left those weights: its ratio moves, the mismatch and the rejected tokens do not."""
    for rank in ranks:
        one, two = (rank[layout]["corrected"][name] for name in ("icepop", "two"))
        assert two["ratio_mean"] != pytest.approx(1, abs=1e-6)
        assert two["tokens"] == one["tokens"]
        # The period before has moved the engine a little, and with it the log-probs that the ratios start from.
        assert figures(two) == pytest.approx(figures(one), rel=1e-4)


@pytest.mark.parametrize("layout", CORRECTED)
def test_a_correction_needs_the_sampler_s_logprobs(layout: str, ranks: list[dict[str, Any]]) -> None:
    """Without one a sampler that gives none is fine, and has no mismatch."""
    for rank in ranks:
        assert "correction=none" in rank[layout]["corrected"]["refusal"]
        assert figures(rank[layout]["corrected"]["unscored"]) == {}
        assert rank[layout]["corrected"]["unscored"]["tokens"] > 0


@pytest.mark.parametrize("layout", CORRECTED)
def test_there_may_be_nothing_to_correct(layout: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        nothing = rank[layout]["corrected"]["nothing"]
        assert nothing["loss"] == nothing["grad_norm"] == 0.0
        assert figures(nothing) == {}


@pytest.mark.parametrize("layout", CORRECTED)
def test_samples_may_be_as_old_as_the_setting_says(layout: str, ranks: list[dict[str, Any]]) -> None:
    """What was learned since shows in the mismatch of the old ones; the fresh ones have none."""
    old, fresh = policy_rows()[::2], policy_rows()[1::2]
    for rank in ranks:
        aged = rank[layout]["aged"]
        begin = aged["version"]
        assert aged["1"] == (
            f"rollouts of weights [{begin - 2}] were offered to weights {begin}, and at most "
            "objective.max_staleness=1 updates may lie between: sample again, or raise it"
        )
        found = figures(aged["2"])
        assert found["age_0/max_abs"] < 1e-5
        assert found["age_2/max_abs"] > 1e-4
        assert found["max_abs"] == found["age_2/max_abs"]
        counts = [sum(len(row.response) for row in rows) for rows in (fresh, old)]
        assert [aged["2"][f"mismatch_tokens@{age}"] for age in (0, 2)] == counts
        together = sum(n * found[f"age_{age}/mean_abs"] for n, age in zip(counts, (0, 2), strict=True)) / sum(counts)
        assert found["mean_abs"] == pytest.approx(together)
        assert aged["newer"].startswith(f"rollouts of weights [{begin + 2}] were offered to weights {begin + 1}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_period_without_samples_runs(layout: str, ranks: list[dict[str, Any]]) -> None:
    """When every group is flat, all ranks still take the same collective steps, with a gradient of zero."""
    for rank in ranks:
        assert rank[layout]["nothing"]["grad_norm"] == 0.0
        assert rank[layout]["nothing"]["loss"] == 0.0


def test_only_rollouts_with_a_signal_are_learned_from(ranks: list[dict[str, Any]]) -> None:
    """Truncated ones are masked, unreadable ones count 0, flat groups go; z-scores of (1, 0, 0) and (0, 1)."""
    expected = [
        ("policy", (3,), 2**0.5),
        ("policy", (4,), -(0.5**0.5)),
        ("policy", (6,), -(0.5**0.5)),
        ("pairwise", (3,), -1.0),
        ("pairwise", (4,), 1.0),
    ]
    found = ranks[0]["samples"]
    assert [f[:2] for f in found] == [e[:2] for e in expected]
    assert [f[2] for f in found] == pytest.approx([e[2] for e in expected])
