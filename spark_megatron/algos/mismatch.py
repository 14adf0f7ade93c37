"""How far trainer and sampler disagree about the sampled tokens, and what such a token then counts.

The sampler's kernels, its precision or the age of its weights give a token another probability than the trainer
computes, so that the samples are not quite the policy's own. With ``log rho = old - rollout`` for each sampled token
(``old``: the trainer's log-prob before the first update of the period, ``rollout``: the sampler's, both at the
temperature of sampling) ``rho`` is the weight that importance sampling gives to it. In fp32 it is 1 up to rounding;
see :func:`figures` for what tells when it is not, and :class:`Correction` for what can be done.

Everything is summed per weight version, so that what was learned since the sampling is told apart from what the
engines compute differently. Sums have the key ``name@version``; those of micro-batches, ranks and updates add up, but
for the names that begin with "max_", which take the maximum (``runtime.combine``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from spark_megatron.algos.numerics import EXP_LIMIT
from spark_megatron.runtime import combine
from spark_megatron.types import Batch, Metrics

BAND = (0.5, 5.0)
"""The ratios that count as ordinary in ``outside_share``: IcePop's usual bounds (see there), whatever is corrected."""

_SHARES: Mapping[str, tuple[str, str]] = {
    "mean_abs": ("mismatch_abs", "mismatch_tokens"),
    "k3": ("mismatch_k3", "mismatch_tokens"),
    "ratio": ("mismatch_ratio", "mismatch_tokens"),
    "outside_share": ("mismatch_outside", "mismatch_tokens"),
    "rejected_share": ("mismatch_rejected", "mismatch_weighed"),
    "truncated_share": ("mismatch_truncated", "mismatch_weighed"),
    "rejected_sequence_share": ("mismatch_rejected_sequences", "mismatch_weighed_sequences"),
}
"""Figures that are one sum over another."""


def sums(
    mask: torch.Tensor, old: torch.Tensor, rollout_logprobs: torch.Tensor, weight_version: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Summed statistics (float64 scalars) of the positions where ``mask`` holds; all tensors are of one shape.

    Left out are positions without a log-prob of the sampler (NaN). A position may hold anything where ``mask`` does
    not. Without any position that counts there are no sums.
    """
    known = mask & ~rollout_logprobs.isnan()
    log_ratio = old.detach()[known].double() - rollout_logprobs[known].double()
    ratio = _exp(log_ratio)
    distance = log_ratio.abs()
    columns = {
        "mismatch_tokens": torch.ones_like(ratio),
        "mismatch_abs": distance,
        "max_mismatch_abs": distance,
        "mismatch_k3": ratio - 1 - log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT),
        "mismatch_ratio": ratio,
        "mismatch_ratio_squared": ratio.square(),
        "mismatch_outside": ~_within(log_ratio, *BAND),
    }
    return _per_version(columns, weight_version[known])


def by_age(stats: Mapping[str, float], weight_version: int) -> Metrics:
    """The sums among ``stats`` with their weight version as an age: the updates that lie before ``weight_version``."""
    split = ((key.split("@"), value) for key, value in stats.items() if "@" in key)
    return {f"{name}@{weight_version - int(version)}": value for (name, version), value in split}


def figures(stats: Mapping[str, float]) -> Metrics:
    """What the combined sums of :func:`by_age` say; other entries of ``stats`` are ignored, no sums give no figures.

    ``mean_abs``, ``max_abs``: ``|log rho|`` in nats, not clamped.
    ``k3``: mean of ``rho - 1 - log rho``, an estimate of KL(sampler || trainer) without bias that is never negative (J.
    Schulman, "Approximating KL Divergence", 2020).
    ``ratio``: mean rho; away from 1 the sampled tokens are not what the sampler says it drew from.
    ``effective_share``: ``(sum rho)^2 / (n sum rho^2)``, Kish's effective sample size over n: the share of the tokens
    whose plain mean would vary as much as the one weighted by rho.
    ``outside_share``: the share with rho outside of ``BAND``.
    ``rejected_share``, ``truncated_share``, ``rejected_sequence_share``: where a correction was at work, the tokens
    that it left without a weight or with one below rho, and the sequences that it left without any.

    Where there are samples of several ages, each one's figures follow as ``age_<updates>/<name>``.
    """
    ages: dict[int, dict[str, float]] = {}
    for key, value in stats.items():
        name, found, age = key.partition("@")
        if found:
            ages.setdefault(int(age), {})[name] = value
    result = _figures(combine(ages.values()))
    if len(ages) > 1:
        for updates, own in sorted(ages.items()):
            result |= {f"age_{updates}/{name}": value for name, value in _figures(own).items()}
    return result


class Correction(Protocol):
    """``(log_ratio, lengths) -> weights``: factors of the policy loss of each sampled token of a micro-batch.

    ``log_ratio`` is ``log rho`` [sampled tokens], sequence by sequence; ``lengths`` [sequences] has the number of them
    in each sequence. There is at least one token in each, and one sequence. Weights are >= 0; 0 rejects a token.
    """

    def __call__(self, log_ratio: torch.Tensor, lengths: torch.Tensor, /) -> torch.Tensor: ...


def no_correction() -> None:
    """Sampled tokens count as if the trainer itself had sampled them."""


@dataclass(frozen=True, kw_only=True)
class Truncated:
    """``min(rho, cap)``: importance sampling whose rare large weights are cut.

    From F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), known to us
    through verl's documentation, whose cap is 2, and slime's code. The check of the cap is ours.
    """

    cap: float

    def __post_init__(self) -> None:
        if not 1 <= self.cap < math.inf:
            raise ValueError(
                f"correction.cap={self.cap} must be a finite number >= 1, e.g. 2: below 1 it would cut the weights of "
                "tokens on which trainer and sampler agree"
            )

    def __call__(self, log_ratio: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return _exp(log_ratio).clamp(max=self.cap)


@dataclass(frozen=True, kw_only=True)
class IcePop:
    """``rho`` within [low, high], bounds included, and 0 outside: the tokens with large gaps are rejected.

    From the Ring-1T report (arXiv 2510.18855), known to us through NeMo-RL's guide to ProRLv2 (bounds 0.5 and 5) and
    slime's code. The same group later saw a fixed band reject fewer tokens while the gap grew: watch ``mean_abs`` too.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, log_ratio: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.where(_within(log_ratio, self.low, self.high), _exp(log_ratio), 0.0)


@dataclass(frozen=True, kw_only=True)
class SequenceMask:
    """``rho`` for all tokens of a sequence whose geometric mean of rho lies within [low, high], 0 for all others.

    NeMo-RL's "seq-mask-tis", with bounds 0.999 and 1.002 (known to us at second hand). The geometric mean does not
    depend on the length of a sequence, as the product would.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, log_ratio: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        means = torch.segment_reduce(log_ratio, "mean", lengths=lengths)
        kept = _within(means, self.low, self.high).repeat_interleave(lengths)
        return torch.where(kept, _exp(log_ratio), 0.0)


def correct(batch: Batch, correction: Correction) -> dict[str, torch.Tensor]:
    """Multiply, in place, the advantage of every sampled token by its weight; sums of what that did.

    A policy loss is proportional to its advantage as long as that does not change its sign, so that this weighs the
    loss (decoupled PPO, with PPO's own ratio to ``old_logprobs`` apart); the KL term stays. The token weights stay too:
    the loss is still divided by all tokens, and rejecting some does not make the others count more.

    Give whole micro-batches, not a rank's cut of one: a correction may look at whole sequences.

    Raises:
        ValueError: a sampled token has no log-prob of the sampler, or the batch has none of the trainer.
    """
    if batch.old_logprobs is None:
        raise ValueError("a correction needs the trainer's log-probs: compute old_logprobs before it")
    sampled = (batch.weight != 0) & ~batch.supervised
    if not sampled.any():
        return {}
    rollout = batch.rollout_logprobs[sampled].double()
    unknown = int(rollout.isnan().sum())
    if unknown:
        raise ValueError(
            f"the sampler gave no log-prob for {unknown} of {len(rollout)} sampled tokens, and a correction needs "
            "them: choose a rollout backend with a model (rollout=vllm), or correction=none"
        )
    before = torch.cat([sampled.new_zeros(1, dtype=torch.long), sampled.cumsum(0)])
    lengths = before[batch.cu_seqlens.long()].diff()
    lengths = lengths[lengths > 0]
    log_ratio, versions = batch.old_logprobs[sampled].double() - rollout, batch.weight_version[sampled]
    weights = correction(log_ratio, lengths)
    batch.advantage[sampled] *= weights.to(batch.advantage.dtype)
    rejected = weights == 0
    tokens = {
        "mismatch_weighed": torch.ones_like(weights),
        "mismatch_rejected": rejected,
        "mismatch_truncated": ~rejected & (weights < _exp(log_ratio)),
    }
    sequences = {
        "mismatch_weighed_sequences": torch.ones_like(lengths),
        "mismatch_rejected_sequences": torch.segment_reduce(weights, "max", lengths=lengths) == 0,
    }
    return _per_version(tokens, versions) | _per_version(sequences, versions[lengths.cumsum(0) - 1])


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).exp()


def _within(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Compared as logarithms, so that the bounds belong to the band however their exponentials round."""
    return (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))


def _check_band(low: float, high: float) -> None:
    if not 0 < low <= 1:
        raise ValueError(f"correction.low={low} must lie in (0, 1]: trainer and sampler agree at a ratio of 1")
    if not 1 <= high < math.inf:
        raise ValueError(f"correction.high={high} must be a finite number >= 1: trainer and sampler agree at 1")


def _per_version(columns: Mapping[str, torch.Tensor], versions: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sum of each column's values per weight version; the maximum for names that begin with "max_"."""
    found = {}
    for version in torch.unique(versions).tolist():
        rows = versions == version
        for name, column in columns.items():
            values = column[rows].double()
            found[f"{name}@{version}"] = values.max() if name.startswith("max_") else values.sum()
    return found


def _figures(totals: Mapping[str, float]) -> Metrics:
    found = {name: totals[part] / totals[whole] for name, (part, whole) in _SHARES.items() if totals.get(whole)}
    if "mismatch_tokens" in totals:
        found["max_abs"] = totals["max_mismatch_abs"]
        squares = totals["mismatch_tokens"] * totals["mismatch_ratio_squared"]
        found["effective_share"] = totals["mismatch_ratio"] ** 2 / squares
    return found
