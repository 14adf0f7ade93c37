"""One loss for all components of the objective: every token brings its own weight, and the loss is a plain sum.

A token of component c weighs ``coef_c / N_c``, with ``N_c`` counted over all micro-batches and data ranks of the step.
The weights are set before the first forward pass, so any cut of the step into micro-batches or ranks adds up to the
same loss and the same gradient, and a cut without trained tokens adds a zero that is still part of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from spark_megatron.algos import mismatch
from spark_megatron.algos.kl import KLEstimator
from spark_megatron.algos.policy_loss import PolicyLoss, TokenLoss
from spark_megatron.types import Batch, Component, Metrics

Stats = dict[str, torch.Tensor]
"""Detached float64 scalars. Keys that begin with "max_" combine by maximum, all others by addition."""

COUNT_OF: Mapping[str, str] = {
    "entropy": "tokens",
    "policy_loss": "policy_tokens",
    "ratio": "policy_tokens",
    "clipped": "policy_tokens",
    "cross_entropy": "supervised_tokens",
    "kl": "kl_tokens",
}
"""Which count turns a summed statistic into a mean per token."""


def component_coefs(weights: Mapping[Component, float], counts: Mapping[Component, int]) -> dict[Component, float]:
    """The weight of one token of each component when each has its own mean: ``weights[c] / counts[c]``.

    ``counts`` are the global numbers of trained tokens of the step. A component without tokens gets 0. ValueError for
    a component that has tokens and no weight.
    """
    unknown = sorted(c for c, n in counts.items() if n and c not in weights)
    if unknown:
        raise ValueError(f"no weight for the components {unknown}; there are weights for {sorted(weights)}")
    return {c: weights[c] / n if n else 0.0 for c, n in counts.items()}


def merged_coefs(counts: Mapping[Component, int]) -> dict[Component, float]:
    """The weight of one token of each component when all share one mean: 1 over the total count (0 without tokens).

    SPARK's alternating periods are such plain token means, whatever kinds of tasks a period holds.
    """
    total = sum(counts.values())
    return {c: 1 / total if n else 0.0 for c, n in counts.items()}


def token_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: Batch,
    policy_loss: PolicyLoss,
    kl_coef: float,
    kl_estimator: KLEstimator,
) -> tuple[torch.Tensor, Stats]:
    """Loss (scalar) and summed statistics of one micro-batch; all tensors are [tokens].

    ``loss = sum_t weight_t * (-logp_t if supervised_t else policy_t) + kl_coef * sum_t kl_weight_t * kl_t``

    ``logprobs`` are those of ``batch.labels`` under the current weights, ``entropy`` (nats) is only reported. Without
    ``batch.old_logprobs`` the step is taken to be the first since sampling, with a ratio of 1. Values at positions
    without weight may be anything, NaN included; a NaN at a trained position makes the loss NaN.

    Statistics: "loss" (already weighted: add, do not divide), "tokens", "policy_tokens", "supervised_tokens", the sums
    named in ``COUNT_OF``, and those of :func:`mismatch.sums`, which compares the sampler with the trainer before the
    first update: later ones also differ by what was learned. "kl" and "kl_tokens" are there if the batch has reference
    log-probabilities.

    ValueError for tensors that do not fit, and for a KL coefficient without reference log-probabilities.
    """
    _check(logprobs, entropy, batch, kl_coef)
    policy = (batch.weight != 0) & ~batch.supervised
    supervised = (batch.weight != 0) & batch.supervised
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    terms = policy_loss(_inside(policy, logprobs), _inside(policy, old), _inside(policy, batch.advantage))
    loss = (batch.weight * torch.where(supervised, -logprobs, terms.loss)).sum()

    stats = {
        "tokens": _count(batch.trained),
        "entropy": _total(batch.trained, entropy),
        "supervised_tokens": _count(supervised),
        "cross_entropy": _total(supervised, -logprobs),
        **_policy_stats(policy, terms),
        **mismatch.sums(policy, old, batch.rollout_logprobs, batch.weight_version),
    }
    if batch.ref_logprobs is not None:
        near = batch.kl_weight != 0
        kl = kl_estimator(_inside(near, logprobs), _inside(near, batch.ref_logprobs))
        loss = loss + kl_coef * (batch.kl_weight * kl).sum()
        stats |= {"kl_tokens": _count(near), "kl": _total(near, kl)}
    return loss, {"loss": loss.detach().double(), **stats}


def mean_stats(stats: Mapping[str, torch.Tensor | float]) -> Metrics:
    """Merged statistics as numbers, with each sum divided by its count; a mean over no token is left out."""
    numbers = {key: float(value) for key, value in stats.items()}
    means = {key: numbers[key] / numbers[n] for key, n in COUNT_OF.items() if key in numbers and numbers[n]}
    return {key: value for key, value in numbers.items() if key not in COUNT_OF} | means


def _inside(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` where the mask holds and 0 elsewhere.

    It is the inputs of a formula that must be replaced: replacing its result would send 0 * NaN backwards.
    """
    return torch.where(mask, values, torch.zeros_like(values))


def _count(mask: torch.Tensor) -> torch.Tensor:
    return mask.sum().double()


def _total(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return _inside(mask, values.detach()).sum(dtype=torch.float64)


def _policy_stats(policy: torch.Tensor, terms: TokenLoss) -> Stats:
    return {
        "policy_tokens": _count(policy),
        "policy_loss": _total(policy, terms.loss),
        "ratio": _total(policy, terms.ratio),
        "clipped": _count(policy & terms.clipped),
    }


def _check(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch, kl_coef: float) -> None:
    given = {
        "entropy": entropy,
        "weight": batch.weight,
        "kl_weight": batch.kl_weight,
        "advantage": batch.advantage,
        "supervised": batch.supervised,
        "rollout_logprobs": batch.rollout_logprobs,
        "weight_version": batch.weight_version,
        "old_logprobs": batch.old_logprobs,
        "ref_logprobs": batch.ref_logprobs,
    }
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}")
    if batch.supervised.dtype != torch.bool:
        raise ValueError(f"supervised has the type {batch.supervised.dtype}; it is a mask and must be torch.bool")
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs have the type {logprobs.dtype}; compute them in float32, or ratios lose all digits")
    if not 0 <= kl_coef < math.inf:
        raise ValueError(f"kl_coef={kl_coef} must be a finite number >= 0")
    if kl_coef and batch.ref_logprobs is None:
        raise ValueError(f"kl_coef={kl_coef} needs ref_logprobs: give a reference model or set the coefficient to 0")
