import math
from pathlib import Path

import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from spark_megatron.algos.advantages import ZScore

CONF = Path(__file__).parents[2] / "conf" / "advantage"
REWARDS = st.lists(st.none() | st.floats(-10, 10), max_size=9)


def zscore(eps: float = 0.0, unbiased: bool = False, baseline: str = "mean") -> ZScore:
    return ZScore(eps=eps, unbiased=unbiased, baseline=baseline)  # type: ignore[arg-type]


def test_population_std() -> None:
    # mean 1/4, variance 3/16, std sqrt(3)/4.
    assert zscore()([1, 0, 0, 0]) == pytest.approx((math.sqrt(3), *[-1 / math.sqrt(3)] * 3))


def test_unbiased_std() -> None:
    # variance 3/4 / 3 = 1/4, std 1/2.
    assert zscore(unbiased=True)([1, 0, 0, 0]) == pytest.approx((1.5, -0.5, -0.5, -0.5))


def test_eps_is_added_to_the_std() -> None:
    assert zscore(eps=0.5, unbiased=True)([1, 0, 0, 0]) == pytest.approx((0.75, -0.25, -0.25, -0.25))


def test_minimum_as_baseline_pushes_no_rollout_down() -> None:
    assert zscore(unbiased=True, baseline="min")([1, 0, 0, 0]) == pytest.approx((2, 0, 0, 0))


@pytest.mark.parametrize("reward", [0.7, 0.3, 0.1, 1.0])
@pytest.mark.parametrize("unbiased", [False, True])
def test_equal_rewards_give_exactly_zero(reward: float, unbiased: bool) -> None:
    assert zscore(eps=0.0, unbiased=unbiased)([reward] * 8) == (0.0,) * 8


@pytest.mark.parametrize("baseline", ["mean", "min"])
def test_group_of_one_gives_zero(baseline: str) -> None:
    assert zscore(unbiased=True, baseline=baseline)([1.0]) == (0.0,)
    assert zscore(unbiased=True, baseline=baseline)([None, 1.0]) == (None, 0.0)
    assert zscore()([]) == ()


def test_masked_rollouts_stay_masked_and_do_not_count() -> None:
    strategy = zscore(eps=1e-6, unbiased=True)
    a, b, c = strategy([1.0, 0.0, 0.0])
    assert strategy([None, 1.0, None, 0.0, 0.0]) == (None, a, None, b, c)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="reward 1 of a group"):
        zscore()([1.0, bad, 0.0, 0.0])


@given(REWARDS, st.booleans(), st.sampled_from(["mean", "min"]))
def test_advantages_are_finite_and_keep_the_order(rewards: list[float | None], unbiased: bool, baseline: str) -> None:
    advantages = zscore(eps=1e-6, unbiased=unbiased, baseline=baseline)(rewards)
    assert [a is None for a in advantages] == [r is None for r in rewards]
    pairs = sorted((r, a) for r, a in zip(rewards, advantages, strict=True) if r is not None and a is not None)
    assert all(math.isfinite(a) for _, a in pairs)
    assert [a for _, a in pairs] == sorted(a for _, a in pairs)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=16))
def test_advantages_are_centred_with_unit_spread(rewards: list[float]) -> None:
    advantages = [a for a in zscore()(rewards) if a is not None]
    assert sum(advantages) == pytest.approx(0, abs=1e-9)
    spread = math.fsum(a * a for a in advantages) / len(advantages)
    assert spread == pytest.approx(1.0 if len(set(rewards)) > 1 else 0.0)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=9), st.sampled_from([-4.0, 0.5, 8.0]))
def test_only_the_distances_of_rewards_matter(rewards: list[float], shift: float) -> None:
    assert zscore()([2 * r + shift for r in rewards]) == pytest.approx(zscore()(rewards))


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_eps_is_checked(eps: float) -> None:
    with pytest.raises(ValueError, match=r"advantage\.eps"):
        zscore(eps=eps)


def test_baseline_is_checked() -> None:
    with pytest.raises(ValueError, match=r"advantage\.baseline='zero'"):
        zscore(baseline="zero")


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configured_strategy_scores_a_group(path: Path) -> None:
    advantages = instantiate(OmegaConf.load(path))([1.0, None, 0.0, 0.0])
    assert advantages[1] is None
    assert advantages[0] > advantages[2] == advantages[3]


def test_configured_default_is_the_released_formula() -> None:
    assert instantiate(OmegaConf.load(CONF / "zscore.yaml")) == zscore(eps=1e-6, unbiased=True)
