"""From samples to micro-batches whose per-token weights make the loss of a step a plain sum."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from spark_megatron.types import Batch, Component, Sample


def token_counts(samples: Sequence[Sample]) -> dict[Component, int]:
    """The number of trained tokens per component."""
    counts: Counter[Component] = Counter()
    for sample in samples:
        counts[sample.component] += len(sample.response)
    return dict(counts)


def kl_token_count(samples: Sequence[Sample]) -> int:
    """The number of tokens that the KL term covers: those trained with the policy-gradient loss."""
    return sum(len(sample.response) for sample in samples if sample.loss == "policy_gradient")


def split_updates(samples: Sequence[Sample], k: int, rng: random.Random) -> list[list[Sample]]:
    """The samples, shuffled, in ``k`` parts whose sizes differ by at most one (some empty when there are fewer)."""
    if k < 1:
        raise ValueError(f"k={k}: the number of updates must be at least 1")
    shuffled = rng.sample(samples, len(samples))
    return [shuffled[part::k] for part in range(k)]


def pack(
    samples: Sequence[Sample], token_weight: Mapping[Component, float], kl_count: int, max_tokens: int, pad_id: int
) -> list[Batch]:
    """Micro-batches of at most ``max_tokens`` tokens, padding included; a longer single row is one of its own.

    ``token_weight`` (coef_c / N_c per component) and ``kl_count`` must come from the whole step, over all micro-batches
    and data ranks; the step's loss is then the sum over all batches. Without samples there is one batch of a single
    row of two tokens and zero weight, so that every rank has something to run.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
    unknown = sorted({sample.component for sample in samples} - set(token_weight))
    if unknown:
        raise ValueError(f"no token weight for the components {unknown}; there are weights for {sorted(token_weight)}")
    kl_weight = _kl_weight(samples, kl_count)
    rows = sorted(samples, key=_length)
    batches = [_batch(part, token_weight, kl_weight, pad_id) for part in _cut(rows, max_tokens)]
    return batches or [_empty(1, 2, pad_id)]


def _length(sample: Sample) -> int:
    return len(sample.prompt) + len(sample.response)


def _cut(rows: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Consecutive runs of rows, shortest row first, each as large as ``max_tokens`` allows."""
    parts: list[list[Sample]] = []
    for row in rows:
        if parts and (len(parts[-1]) + 1) * _length(row) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _kl_weight(samples: Sequence[Sample], kl_count: int) -> float:
    if kl_count < kl_token_count(samples):
        raise ValueError(f"kl_count={kl_count}: below the {kl_token_count(samples)} policy-gradient tokens given")
    return 1.0 / kl_count if kl_count else 0.0


def _batch(rows: Sequence[Sample], weights: Mapping[Component, float], kl_weight: float, pad_id: int) -> Batch:
    batch = _empty(len(rows), max(map(_length, rows)), pad_id)
    for index, sample in enumerate(rows):
        if not sample.prompt or not sample.response:
            raise ValueError(f"a sample of {len(sample.prompt)} prompt and {len(sample.response)} response tokens")
        batch.tokens[index, : _length(sample)] = torch.tensor(sample.prompt + sample.response)
        # The token at position t is predicted at position t - 1.
        trained = slice(len(sample.prompt) - 1, _length(sample) - 1)
        batch.weight[index, trained] = weights[sample.component]
        if sample.loss == "cross_entropy":
            batch.supervised[index, trained] = True
            continue
        if len(sample.rollout_logprobs) != len(sample.response):
            raise ValueError(f"{len(sample.rollout_logprobs)} log-probs for {len(sample.response)} sampled tokens")
        batch.kl_weight[index, trained] = kl_weight
        batch.advantage[index, trained] = sample.advantage
        batch.rollout_logprobs[index, trained] = torch.tensor(sample.rollout_logprobs)
    batch.labels[:, :-1] = batch.tokens[:, 1:]
    return batch


def _empty(rows: int, length: int, pad_id: int) -> Batch:
    """A batch of padding only."""
    shape = (rows, length)
    return Batch(
        tokens=torch.full(shape, pad_id),
        labels=torch.full(shape, pad_id),
        weight=torch.zeros(shape),
        kl_weight=torch.zeros(shape),
        advantage=torch.zeros(shape),
        supervised=torch.zeros(shape, dtype=torch.bool),
        rollout_logprobs=torch.full(shape, float("nan")),
    )
