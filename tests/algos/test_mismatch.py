"""Metrics and corrections against numbers computed by hand, from ratios like 1/2, 2 and 4."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_megatron.algos.kl import k3
from spark_megatron.algos.mismatch import Correction, IcePop, SequenceMask, Truncated, by_age, correct, figures, sums
from spark_megatron.algos.policy_loss import PPOClip
from spark_megatron.algos.unified import token_loss
from spark_megatron.runtime import combine
from spark_megatron.types import Batch, Metrics

NAN, INF = math.nan, math.inf
LOG2 = math.log(2)


def found(
    ratios: Sequence[float], versions: Sequence[int] | None = None, mask: Sequence[bool] | None = None
) -> dict[str, float]:
    """The sums of tokens with these ratios; NaN stands for a token without a log-prob of the sampler."""
    old, rollout = logprobs(torch.tensor(ratios, dtype=torch.float64))
    counted = torch.ones(len(ratios), dtype=torch.bool) if mask is None else torch.tensor(mask)
    version = torch.tensor([4] * len(ratios) if versions is None else versions, dtype=torch.long)
    return numbers(sums(counted, old, rollout, version))


def logprobs(ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of trainer and sampler. The sampler's are 0, so that no rounding moves a ratio over a bound."""
    return ratios.log().nan_to_num(-1.0), torch.where(ratios.isnan(), NAN, 0.0).double()


def numbers(stats: dict[str, torch.Tensor]) -> dict[str, float]:
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in stats.values())
    return {name: float(value) for name, value in stats.items()}


def told(stats: dict[str, float], version: int = 4) -> Metrics:
    return figures(by_age(stats, version))


def test_every_figure_by_hand() -> None:
    assert told(found([1.0, 2.0, 0.5, 0.25])) == pytest.approx(
        {
            "mean_abs": (0 + 1 + 1 + 2) * LOG2 / 4,
            "max_abs": 2 * LOG2,
            "k3": (0 + (1 - LOG2) + (-0.5 + LOG2) + (-0.75 + 2 * LOG2)) / 4,
            "ratio": 3.75 / 4,
            "effective_share": 3.75**2 / (4 * (1 + 4 + 0.25 + 0.0625)),
            "outside_share": 1 / 4,
        }
    )


def test_equal_engines() -> None:
    assert told(found([1.0] * 3)) == {
        "mean_abs": 0.0,
        "max_abs": 0.0,
        "k3": 0.0,
        "ratio": 1.0,
        "effective_share": 1.0,
        "outside_share": 0.0,
    }


def test_one_token_has_all_figures() -> None:
    one = told(found([3.0]))
    assert one["ratio"] == pytest.approx(3.0)
    assert one["effective_share"] == pytest.approx(1.0)
    assert one["max_abs"] == one["mean_abs"]


def test_k3_is_the_estimator_of_the_objective() -> None:
    old, rollout = torch.tensor([-1.0, -2.5, -0.3]).double(), torch.tensor([-1.4, -2.0, -0.3]).double()
    stats = numbers(sums(torch.ones(3, dtype=torch.bool), old, rollout, torch.zeros(3).long()))
    assert told(stats, 0)["k3"] == pytest.approx(float(k3(rollout, old).mean()))


def test_k3_and_ratio_estimate_without_bias() -> None:
    """A token drawn from (0.7, 0.3) while the trainer has (0.4, 0.6): expectations are exact sums over both."""
    sampler, trainer = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
    every = [token for token, share in ((0, 7), (1, 3)) for _ in range(share)]
    stats = sums(torch.ones(10, dtype=torch.bool), trainer.log()[every], sampler.log()[every], torch.zeros(10).long())
    mean = told(numbers(stats), 0)
    assert mean["ratio"] == pytest.approx(1.0)
    assert mean["k3"] == pytest.approx(float((sampler * (sampler / trainer).log()).sum()))


def test_the_band_includes_its_bounds() -> None:
    assert told(found([0.5, 5.0]))["outside_share"] == 0.0
    assert told(found([0.5 - 1e-9, 5.0 + 1e-9]))["outside_share"] == 1.0


def test_tokens_without_sampler_or_outside_of_the_mask_are_left_out() -> None:
    mixed = found([2.0, NAN, 4.0, 0.001], mask=[True, True, True, False])
    assert told(mixed) == pytest.approx(told(found([2.0, 4.0])))
    assert mixed["mismatch_tokens@4"] == 2


@pytest.mark.parametrize("ratios", [[], [NAN, NAN]])
def test_nothing_sampled_has_no_figures(ratios: list[float]) -> None:
    assert found(ratios) == {}
    assert told(found(ratios)) == {}
    assert figures({"loss": 1.0, "tokens": 5.0}) == {}


@pytest.mark.parametrize("distance", [-3000.0, 3000.0, -INF, INF])
def test_nothing_overflows(distance: float) -> None:
    """Ratios are clamped to e^-20 and e^20, distances are told as they are."""
    one = torch.ones(2, dtype=torch.bool)
    stats = numbers(sums(one, torch.tensor([distance, 0.0]), torch.zeros(2), torch.zeros(2).long()))
    mean = told(stats, 0)
    assert mean["max_abs"] == abs(distance)
    for name in ("k3", "ratio", "effective_share", "outside_share"):
        assert math.isfinite(mean[name]), name
    assert mean["effective_share"] == pytest.approx(0.5, abs=1e-8)


def test_a_nan_of_the_trainer_is_not_hidden() -> None:
    one = torch.ones(2, dtype=torch.bool)
    stats = numbers(sums(one, torch.tensor([NAN, -1.0]), torch.tensor([-1.0, -1.0]), torch.zeros(2).long()))
    assert all(math.isnan(told(stats, 0)[name]) for name in ("mean_abs", "max_abs", "k3", "ratio", "effective_share"))


def test_several_versions_are_told_apart_and_together() -> None:
    mixed = told(found([2.0, 2.0, 4.0, 0.25], versions=[7, 6, 7, 4]), version=7)
    for age, alone in ((0, [2.0, 4.0]), (1, [2.0]), (3, [0.25])):
        own = {name.removeprefix(f"age_{age}/"): value for name, value in mixed.items() if f"age_{age}/" in name}
        assert own == pytest.approx(told(found(alone)))
    together = {name: value for name, value in mixed.items() if not name.startswith("age_")}
    assert together == pytest.approx(told(found([2.0, 2.0, 4.0, 0.25])))


def test_halves_of_unequal_size_combine_to_the_whole() -> None:
    """Sums and counts add up, maxima do not: three tokens here and one there are no mean of two means."""
    whole, parts = found([1.0, 2.0, 0.5, 8.0]), [found([1.0, 2.0, 0.5]), found([8.0])]
    assert told(combine(parts)) == pytest.approx(told(whole))
    assert told(whole)["ratio"] == pytest.approx(11.5 / 4)
    assert told(combine(reversed(parts)))["max_abs"] == pytest.approx(3 * LOG2)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(2, 4), st.integers(0, 2)), min_size=1, max_size=12),
)
def test_any_cut_gives_the_same_figures(tokens: list[tuple[float, int, int]]) -> None:
    whole = found([t[0] for t in tokens], [t[1] for t in tokens])
    parts = [[t for t in tokens if t[2] == part] for part in range(3)]
    cut = combine(found([t[0] for t in part], [t[1] for t in part]) for part in parts)
    assert told(cut) == pytest.approx(told(whole), rel=1e-9)


def batch_of(ratios: list[list[float]], **changes: Any) -> Batch:
    """Sequences of one context token, then sampled ones with these ratios and the advantages 1, 2, 3, ..."""
    lengths = [1 + len(row) for row in ratios]
    flat = torch.tensor([value for row in ratios for value in (NAN, *row)], dtype=torch.float64)
    trained = torch.tensor([flag for row in ratios for flag in (False, *[True] * len(row))])
    tokens = len(flat)
    old, rollout = logprobs(flat)
    batch = Batch(
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        tokens=torch.zeros(tokens, dtype=torch.long),
        labels=torch.zeros(tokens, dtype=torch.long),
        weight=torch.where(trained, 1.0 / max(int(trained.sum()), 1), 0.0).double(),
        kl_weight=torch.zeros(tokens, dtype=torch.float64),
        advantage=trained.cumsum(0).double() * trained,
        supervised=torch.zeros(tokens, dtype=torch.bool),
        rollout_logprobs=rollout,
        weight_version=torch.full((tokens,), 4),
        old_logprobs=old,
    )
    return replace(batch, **changes)


def weights(correction: Correction, ratios: list[list[float]]) -> tuple[list[float], Metrics]:
    """What each sampled token's advantage was multiplied by, and the figures of that."""
    batch = batch_of(ratios)
    before, mask = batch.advantage.clone(), batch.trained
    done = told(numbers(correct(batch, correction)))
    assert torch.equal(batch.advantage[~mask], before[~mask])
    return (batch.advantage[mask] / before[mask]).tolist(), done


def test_truncated_by_hand() -> None:
    """The cap itself is not truncated: the token keeps its whole weight."""
    weight, done = weights(Truncated(cap=2.0), [[1.0, 3.0, 0.25], [2.0]])
    assert weight == pytest.approx([1.0, 2.0, 0.25, 2.0])
    assert done == {"rejected_share": 0.0, "truncated_share": 1 / 4, "rejected_sequence_share": 0.0}


def test_icepop_by_hand() -> None:
    """Both bounds belong to the band; a sequence is rejected when all of its tokens are."""
    low, high = 0.5, 5.0
    weight, done = weights(IcePop(low=low, high=high), [[0.5, 5.0, 1.5], [0.4999, 5.001], [0.1, 1.0]])
    assert weight == pytest.approx([0.5, 5.0, 1.5, 0.0, 0.0, 0.0, 1.0])
    assert done == {"rejected_share": 3 / 7, "truncated_share": 0.0, "rejected_sequence_share": 1 / 3}


def test_sequence_mask_by_hand() -> None:
    """Geometric means 1 (of 2 and 1/2), 1.001 and 1.1: the first two are kept, with raw ratios."""
    mask = SequenceMask(low=0.999, high=1.002)
    weight, done = weights(mask, [[2.0, 0.5], [1.001], [1.1] * 3])
    assert weight == pytest.approx([2.0, 0.5, 1.001, 0.0, 0.0, 0.0])
    assert done == {"rejected_share": 3 / 6, "truncated_share": 0.0, "rejected_sequence_share": 1 / 3}


@pytest.mark.parametrize(("ratio", "kept"), [(0.5, True), (2.0, True), (0.4999, False), (2.0001, False)])
def test_the_band_of_sequences_includes_its_bounds(ratio: float, kept: bool) -> None:
    weight, _ = weights(SequenceMask(low=0.5, high=2.0), [[ratio, ratio], [1.0]])
    assert weight == pytest.approx([ratio * kept, ratio * kept, 1.0])


CORRECTIONS = [Truncated(cap=2.0), IcePop(low=0.5, high=5.0), SequenceMask(low=0.999, high=1.002)]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_without_mismatch_nothing_changes(correction: Correction) -> None:
    weight, done = weights(correction, [[1.0, 1.0], [1.0]])
    assert weight == [1.0] * 3
    assert set(done.values()) == {0.0}


@pytest.mark.parametrize("correction", CORRECTIONS[1:])
def test_all_rejected_is_a_loss_of_zero_with_its_denominator(correction: Correction) -> None:
    weight, done = weights(correction, [[9.0, 9.0], [0.01]])
    assert weight == [0.0] * 3
    assert done == {"rejected_share": 1.0, "truncated_share": 0.0, "rejected_sequence_share": 1.0}
    batch = batch_of([[9.0, 9.0], [0.01]])
    correct(batch, correction)
    loss, stats = loss_of(batch)
    assert loss == 0.0
    assert stats["policy_tokens"] == 3


def loss_of(batch: Batch, kl_coef: float = 0.0) -> tuple[float, dict[str, torch.Tensor]]:
    assert batch.old_logprobs is not None
    policy_loss = PPOClip(clip_low=0.2, clip_high=0.2)
    loss, stats = token_loss(batch.old_logprobs, -batch.old_logprobs, batch, policy_loss, kl_coef, k3)
    return loss.item(), stats


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.5, -0.5])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_policy_loss_of_each_token_is_multiplied(shift: float, sign: float) -> None:
    """Value and gradient, for either sign of the advantage, within PPO's bounds and beyond: w * loss = loss(w * A)."""
    ratios = [[1.0, 3.0, 0.25, 1.5]]
    weight = torch.tensor([0.0, *ratios[0]], dtype=torch.float64).clamp(max=2.0)

    def loss(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.old_logprobs is not None
        now = (batch.old_logprobs + shift).requires_grad_()
        token = PPOClip(clip_low=0.2, clip_high=0.2)(now, batch.old_logprobs, batch.advantage).loss
        return token, torch.autograd.grad(token.sum(), now)[0]

    plain, corrected = (batch_of(ratios) for _ in range(2))
    plain.advantage, corrected.advantage = sign * plain.advantage, sign * corrected.advantage
    correct(corrected, Truncated(cap=2.0))
    for without, ours in zip(loss(plain), loss(corrected), strict=True):
        torch.testing.assert_close(ours, weight * without)


def test_kl_and_supervised_tokens_stay_as_they_are() -> None:
    changes: dict[str, Any] = {"kl_weight": torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0]).double()}
    changes |= {"supervised": torch.tensor([False, False, False, False, True])}
    changes |= {"ref_logprobs": torch.full((5,), -1.0).double()}
    plain, corrected = batch_of([[9.0, 9.0], [NAN]], **changes), batch_of([[9.0, 9.0], [NAN]], **changes)
    done = told(numbers(correct(corrected, IcePop(low=0.5, high=5.0))))
    assert done["rejected_share"] == 1.0
    assert done["rejected_sequence_share"] == 1.0, "the supervised sequence is not counted"
    stats, wanted = (loss_of(batch, kl_coef=1.0)[1] for batch in (corrected, plain))
    for name in ("kl", "kl_tokens", "cross_entropy", "supervised_tokens", "policy_tokens", "mismatch_ratio@4"):
        assert stats[name] == wanted[name] != 0, name
    assert (stats["policy_loss"], wanted["policy_loss"]) == (0.0, -3.0)


def test_what_a_correction_did_is_told_per_version_and_adds_up() -> None:
    ratios = [[9.0, 1.0], [9.0], [1.0, 1.0, 1.0]]
    version = torch.tensor([4, 4, 4, 3, 3, 4, 4, 4, 4])
    whole = batch_of(ratios, weight_version=version)
    icepop = IcePop(low=0.5, high=5.0)
    done = told(numbers(correct(whole, icepop)))
    assert (done["rejected_share"], done["rejected_sequence_share"]) == (2 / 6, 1 / 3)
    assert (done["age_0/rejected_share"], done["age_0/rejected_sequence_share"]) == (1 / 5, 0.0)
    assert (done["age_1/rejected_share"], done["age_1/rejected_sequence_share"]) == (1.0, 1.0)
    parts = [batch_of([ratios[0]]), batch_of([ratios[1]], weight_version=torch.tensor([3, 3])), batch_of([ratios[2]])]
    assert told(combine(numbers(correct(part, icepop)) for part in parts)) == done


def test_a_batch_without_sampled_tokens_is_left_alone() -> None:
    batch = batch_of([[1.0], [1.0]], weight=torch.zeros(4).double())
    before = batch.advantage.clone()
    for correction in CORRECTIONS:
        assert correct(batch, correction) == {}
    assert torch.equal(batch.advantage, before)


def test_sampled_tokens_without_a_logprob_of_the_sampler_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no log-prob for 1 of 3 sampled tokens.*rollout=vllm.*correction=none"):
        correct(batch_of([[1.0, NAN], [1.0]]), Truncated(cap=2.0))


def test_the_trainer_s_logprobs_come_first() -> None:
    with pytest.raises(ValueError, match="old_logprobs"):
        correct(batch_of([[1.0]], old_logprobs=None), Truncated(cap=2.0))


REFUSED = [
    (Truncated, {"cap": 0.5}, "correction.cap=0.5"),
    (Truncated, {"cap": INF}, "correction.cap=inf"),
    (Truncated, {"cap": NAN}, "correction.cap=nan"),
    (IcePop, {"low": 0.0, "high": 5.0}, "correction.low=0.0"),
    (IcePop, {"low": 1.5, "high": 5.0}, "correction.low=1.5"),
    (IcePop, {"low": 0.5, "high": 0.9}, "correction.high=0.9"),
    (SequenceMask, {"low": NAN, "high": 2.0}, "correction.low=nan"),
    (SequenceMask, {"low": 0.999, "high": INF}, "correction.high=inf"),
]


@pytest.mark.parametrize(("kind", "values", "message"), REFUSED)
def test_settings_that_would_reject_equal_engines_are_refused(kind: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)
