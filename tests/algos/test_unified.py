import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_megatron.algos.kl import KLEstimator, k1, k2, k3
from spark_megatron.algos.policy_loss import PPOClip
from spark_megatron.algos.unified import (
    Stats,
    component_coefs,
    mean_stats,
    merged_coefs,
    token_loss,
)
from spark_megatron.runtime import combine
from spark_megatron.types import Batch

CLIP = PPOClip(clip_low=0.2, clip_high=0.2)
NAN = math.nan
ANYWHERE = torch.zeros(1, dtype=torch.int32)
"""Where sequences begin. The loss looks at positions one by one; rows of them are easier to read here."""


def batch_of(
    weight: list[list[float]],
    *,
    kl_weight: list[list[float]] | None = None,
    advantage: list[list[float]] | None = None,
    supervised: list[list[bool]] | None = None,
    rollout: list[list[float]] | None = None,
    old: list[list[float]] | None = None,
    ref: list[list[float]] | None = None,
) -> Batch:
    def tensor(values: list[list[float]] | None, fill: float) -> torch.Tensor:
        shape = (len(weight), len(weight[0]))
        return torch.full(shape, fill).double() if values is None else torch.tensor(values, dtype=torch.float64)

    tokens = torch.zeros(len(weight), len(weight[0]), dtype=torch.long)
    return Batch(
        cu_seqlens=ANYWHERE,
        tokens=tokens,
        labels=tokens,
        weight=tensor(weight, 0),
        kl_weight=tensor(kl_weight, 0),
        advantage=tensor(advantage, 0),
        supervised=torch.zeros_like(tokens, dtype=torch.bool) if supervised is None else torch.tensor(supervised),
        rollout_logprobs=tensor(rollout, NAN),
        weight_version=torch.full_like(tokens, 4),
        old_logprobs=None if old is None else tensor(old, 0),
        ref_logprobs=None if ref is None else tensor(ref, 0),
    )


def run(
    logprobs: list[list[float]] | torch.Tensor, batch: Batch, kl_coef: float = 0.0, estimator: KLEstimator = k3
) -> tuple[float, torch.Tensor, Stats]:
    """Loss, gradient and statistics; the entropy of a position is the negative of its log-probability."""
    leaf = torch.as_tensor(logprobs, dtype=torch.float64).clone().requires_grad_()
    loss, stats = token_loss(leaf, -leaf.detach(), batch, CLIP, kl_coef, estimator)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad, stats


def test_token_mean_does_not_depend_on_the_cut() -> None:
    # Two sequences with token losses [1, 1, 1] and [4]: (1 + 1 + 1 + 4) / 4, not the mean 2.5 of the two means.
    logprobs, weight = [[-1.0, -1.0, -1.0], [-4.0, NAN, NAN]], [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]
    trained = [[True] * 3, [True] * 3]
    whole = run(logprobs, batch_of(weight, supervised=trained))[0]
    rows = [run([logprobs[i]], batch_of([weight[i]], supervised=[trained[i]]))[0] for i in (0, 1)]
    assert whole == sum(rows) == 1.75
    assert rows == [0.75, 1.0]


def test_components_in_one_batch() -> None:
    batch = batch_of(
        [[0.5, 0.0, 0.25]],
        kl_weight=[[1.0, 1.0, 0.0]],
        advantage=[[2.0, 3.0, 0.0]],
        supervised=[[False, False, True]],
        old=[[-1.0, -1.0, NAN]],
        ref=[[-2.0, -1.0, NAN]],
    )
    loss, grad, stats = run([[-1.0, -1.0, -8.0]], batch, kl_coef=0.1)
    # 0.5 * (-2) + 0.25 * 8 + 0.1 * (1/e + 0)
    assert loss == pytest.approx(1.0 + 0.1 / math.e)
    assert grad[0].tolist() == pytest.approx([-1.0 + 0.1 * (1 - 1 / math.e), 0.0, -0.25])
    assert stats["loss"].item() == loss


def test_statistics_are_sums_over_their_own_tokens() -> None:
    batch = batch_of(
        [[0.1, 0.1, 0.1, 0.1, 0.0]],
        kl_weight=[[0.5, 0.5, 0.0, 0.0, 0.0]],
        advantage=[[1.0, -1.0, 1.0, 0.0, 9.0]],
        supervised=[[False, False, False, True, False]],
        rollout=[[-1.5, -1.0, NAN, NAN, -9.0]],
        old=[[-1.0, -1.0, -3.0, NAN, NAN]],
        ref=[[-2.0, -1.0, NAN, NAN, NAN]],
    )
    _, _, stats = run([[-1.0, -1.0, -1.0, -4.0, NAN]], batch, kl_coef=1.0, estimator=k1)
    assert {key: value.item() for key, value in stats.items() if key != "loss"} == pytest.approx(
        {
            "tokens": 4,
            "entropy": 7.0,
            "supervised_tokens": 1,
            "cross_entropy": 4.0,
            "policy_tokens": 3,
            "policy_loss": -1.0 + 1.0 - 1.2,
            "ratio": 2 + math.e**2,
            "clipped": 1,
            "mismatch_tokens@4": 2,
            "mismatch_abs@4": 0.5,
            "max_mismatch_abs@4": 0.5,
            "mismatch_k3@4": math.e**0.5 - 1.5,
            "mismatch_ratio@4": math.e**0.5 + 1,
            "mismatch_ratio_squared@4": math.e + 1,
            "mismatch_outside@4": 0,
            "kl_tokens": 2,
            "kl": 1.0,
        }
    )
    assert all(v.dtype == torch.float64 and v.dim() == 0 and not v.requires_grad for v in stats.values())
    means = mean_stats(stats)
    assert means["entropy"] == 7.0 / 4
    assert means["ratio"] == pytest.approx((2 + math.e**2) / 3)
    assert means["tokens"] == 4


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_remains() -> None:
    loss, grad, stats = run([[-1.0, -2.0]], batch_of([[0.5, 0.5]], advantage=[[1.0, -3.0]], rollout=[[-1.25, -2.0]]))
    assert loss == pytest.approx(1.0)
    assert grad[0].tolist() == pytest.approx([-0.5, 1.5])
    assert stats["ratio"].item() == 2.0
    assert stats["max_mismatch_abs@4"].item() == 0.25


def test_mismatch_is_that_of_the_weights_that_sampled() -> None:
    batch = batch_of([[1.0]], advantage=[[1.0]], rollout=[[-1.0]], old=[[-1.125]])
    assert run([[-3.0]], batch)[2]["mismatch_abs@4"].item() == 0.125


@pytest.mark.parametrize("estimator", [k2, k3])
def test_kl_term_is_added_and_pulls_towards_the_reference(estimator: KLEstimator) -> None:
    batch = batch_of([[0.0]], kl_weight=[[1.0]], ref=[[-2.0]])
    loss, grad, _ = run([[-1.0]], batch, kl_coef=0.5, estimator=estimator)
    assert loss == pytest.approx(0.5 * estimator(torch.tensor(-1.0), torch.tensor(-2.0)).item())
    assert loss > 0
    assert grad.item() > 0


def test_kl_is_reported_but_not_trained_at_coefficient_zero() -> None:
    batch = batch_of([[0.0]], kl_weight=[[1.0]], ref=[[-2.0]])
    loss, grad, stats = run([[-1.0]], batch, kl_coef=0.0)
    assert (loss, grad.item()) == (0.0, 0.0)
    assert stats["kl"].item() == pytest.approx(1 / math.e)


def test_no_kl_statistics_without_reference() -> None:
    stats = run([[-1.0]], batch_of([[1.0]], kl_weight=[[1.0]]))[2]
    assert "kl" not in stats
    assert "kl" not in mean_stats(stats)


def poisoned(values: torch.Tensor | None, keep: torch.Tensor, poison: float) -> torch.Tensor | None:
    return None if values is None else torch.where(keep, values, torch.full_like(values, poison))


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
def test_nothing_leaks_from_outside_the_masks(poison: float) -> None:
    logprobs, batch = random_step(seed=3)
    clean_loss, clean_grad, clean_stats = run(logprobs, batch, kl_coef=0.3)
    policy, near = (batch.weight != 0) & ~batch.supervised, batch.kl_weight != 0
    dirty = replace(
        batch,
        **{  # type: ignore[arg-type]
            "advantage": poisoned(batch.advantage, policy, poison),
            "rollout_logprobs": poisoned(batch.rollout_logprobs, policy, poison),
            "old_logprobs": poisoned(batch.old_logprobs, policy, poison),
            "ref_logprobs": poisoned(batch.ref_logprobs, near, poison),
        },
    )
    hidden = poisoned(logprobs, batch.trained, poison)
    assert hidden is not None
    loss, grad, stats = run(hidden, dirty, kl_coef=0.3)
    assert loss == clean_loss
    assert torch.equal(grad, clean_grad)
    assert stats == clean_stats


def test_a_nan_at_a_trained_position_is_not_hidden() -> None:
    assert math.isnan(run([[NAN, -1.0]], batch_of([[0.5, 0.5]], advantage=[[1.0, 1.0]]))[0])


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_a_batch_without_trained_tokens_gives_a_zero_in_the_graph(shape: tuple[int, int]) -> None:
    zeros = torch.zeros(shape, dtype=torch.float64)
    nans, tokens = torch.full_like(zeros, NAN), zeros.long()
    mask = tokens.bool()
    batch = Batch(
        ANYWHERE, tokens, tokens, zeros, zeros, nans, mask, nans, tokens, old_logprobs=nans, ref_logprobs=nans
    )
    loss, grad, stats = run(nans, batch, kl_coef=1.0)
    assert loss == 0.0
    assert torch.equal(grad, zeros)
    assert all(value == 0 for value in stats.values())
    assert set(mean_stats(stats)) == {"loss", "tokens", "policy_tokens", "supervised_tokens", "kl_tokens"}


def random_step(seed: int, rows: int = 6, length: int = 5) -> tuple[torch.Tensor, Batch]:
    """A step with prompts, padding, supervised and sampled rows, weighted by its own global counts."""
    rng = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(rows, length, generator=rng, dtype=torch.float64)

    logprobs = -normal().abs() - 0.1
    trained = torch.rand(rows, length, generator=rng) < 0.6
    supervised = (torch.rand(rows, 1, generator=rng) < 0.4).expand(rows, length).clone()
    sampled = trained & ~supervised
    weight = torch.zeros(rows, length, dtype=torch.float64)
    for mask, coef in ((sampled, 1.0), (trained & supervised, 0.4)):
        weight[mask] = coef / max(int(mask.sum()), 1)
    weight[:, 0] *= supervised[:, 0]  # Sampled tokens of the first column are held near the reference and no more.
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return logprobs, Batch(
        cu_seqlens=ANYWHERE,
        tokens=tokens,
        labels=tokens,
        weight=weight,
        kl_weight=sampled / sampled.sum().clamp(min=1).double(),
        advantage=normal(),
        supervised=supervised,
        rollout_logprobs=logprobs + 0.01 * normal(),
        weight_version=torch.arange(rows)[:, None].expand(rows, length) // 2,
        old_logprobs=logprobs + 0.3 * normal(),
        ref_logprobs=logprobs + 0.5 * normal(),
    )


def rows_of(batch: Batch, rows: list[int]) -> Batch:
    return Batch(ANYWHERE, **{name: values[rows] for name, values in batch.per_token().items()})


@settings(deadline=None)
@given(st.integers(0, 999), st.permutations(range(6)), st.sets(st.integers(1, 5)), st.sampled_from([k1, k2, k3]))
def test_any_cut_gives_the_same_loss_gradient_and_statistics(
    seed: int, order: list[int], cuts: set[int], estimator: KLEstimator
) -> None:
    logprobs, batch = random_step(seed)
    whole_loss, whole_grad, whole_stats = run(logprobs, batch, 0.3, estimator)
    bounds = [0, *sorted(cuts), 6]
    parts = [order[a:b] for a, b in pairwise(bounds)]
    results = [run(logprobs[rows], rows_of(batch, rows), 0.3, estimator) for rows in parts]

    assert sum(loss for loss, _, _ in results) == pytest.approx(whole_loss, rel=1e-10, abs=1e-12)
    grad = torch.empty_like(whole_grad)
    for rows, (_, part_grad, _) in zip(parts, results, strict=True):
        grad[rows] = part_grad
    torch.testing.assert_close(grad, whole_grad, rtol=1e-12, atol=1e-15)
    merged = combine({name: float(value) for name, value in stats.items()} for _, _, stats in results)
    assert mean_stats(merged) == pytest.approx(mean_stats(whole_stats), rel=1e-10, abs=1e-12)


def test_component_coefs_give_every_component_its_own_mean() -> None:
    weights = {"policy": 1.0, "pointwise": 0.4, "pairwise": 0.3}
    coefs = component_coefs(weights, {"policy": 200, "pointwise": 8, "pairwise": 0, "reflection": 0})
    assert coefs == pytest.approx({"policy": 0.005, "pointwise": 0.05, "pairwise": 0.0, "reflection": 0.0})


def test_component_coefs_refuse_tokens_without_a_weight() -> None:
    with pytest.raises(ValueError, match=r"no weight for the components \['sft'\]"):
        component_coefs({"policy": 1.0}, {"policy": 3, "sft": 2})


def test_merged_coefs_share_one_denominator() -> None:
    assert merged_coefs({"pointwise": 3, "reflection": 1, "pairwise": 0}) == {
        "pointwise": 0.25,
        "reflection": 0.25,
        "pairwise": 0.0,
    }
    assert merged_coefs({"policy": 0}) == {"policy": 0.0}


@pytest.mark.parametrize("name", ["weight", "advantage", "rollout_logprobs", "weight_version", "ref_logprobs"])
def test_shapes_are_checked(name: str) -> None:
    logprobs, batch = random_step(seed=0)
    with pytest.raises(ValueError, match=rf"{name} has the shape \(6, 4\), logprobs \(6, 5\)"):
        run(logprobs, replace(batch, **{name: getattr(batch, name)[:, :4]}))


def test_a_mask_must_be_bool() -> None:
    logprobs, batch = random_step(seed=0)
    with pytest.raises(ValueError, match=r"must be torch\.bool"):
        run(logprobs, replace(batch, supervised=batch.advantage))


def test_half_precision_logprobs_are_refused() -> None:
    batch = batch_of([[1.0]])
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        token_loss(torch.zeros(1, 1, dtype=torch.bfloat16), torch.zeros(1, 1), batch, CLIP, 0.0, k3)


@pytest.mark.parametrize("kl_coef", [-0.1, NAN, math.inf])
def test_kl_coefficient_is_checked(kl_coef: float) -> None:
    with pytest.raises(ValueError, match="kl_coef"):
        run([[-1.0]], batch_of([[1.0]], ref=[[-1.0]]), kl_coef)


def test_kl_coefficient_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        run([[-1.0]], batch_of([[1.0]]), kl_coef=0.1)
