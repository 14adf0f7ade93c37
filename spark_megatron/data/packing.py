"""From samples to micro-batches whose per-token weights make the loss of a step a plain sum."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from spark_megatron.types import Batch, Component, Sample

Plan = list[list[list[int]]]
"""``plan[rank][micro-batch]``: the indices of the rows that a data rank's micro-batch holds."""


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


def partition(lengths: Sequence[int], max_tokens: int, ranks: int) -> Plan:
    """Which rows go into which micro-batch of which data rank.

    Every rank gets the same number of micro-batches, the smallest that keeps each within ``max_tokens`` (a longer row
    is alone in one). Rows are dealt longest first, each to the micro-batch with the fewest tokens, so that all ranks
    have nearly the same work; see ``imbalance``. A micro-batch may be empty when there are too few rows.
    """
    if max_tokens < 1 or ranks < 1:
        raise ValueError(f"max_tokens={max_tokens} and ranks={ranks} must be at least 1")
    count = max(1, -(-sum(lengths) // (max_tokens * ranks)))
    while True:
        parts = deal(lengths, count * ranks)
        if all(len(part) == 1 or sum(lengths[row] for row in part) <= max_tokens for part in parts):
            # The fullest micro-batches come first, so that all ranks run equally full ones at the same time.
            parts.sort(key=lambda part: -sum(lengths[row] for row in part))
            return [parts[rank::ranks] for rank in range(ranks)]
        count += 1


def deal(costs: Sequence[float], parts: int) -> list[list[int]]:
    """The indices of ``costs`` in ``parts`` parts of nearly equal sums: the costliest first, each to the least full."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    fill = [(0.0, part) for part in range(parts)]
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        cost, part = heapq.heappop(fill)
        dealt[part].append(row)
        heapq.heappush(fill, (cost + costs[row], part))
    return dealt


def imbalance(lengths: Sequence[int], plan: Plan) -> float:
    """Tokens of the busiest data rank over the mean of all (1.0: perfectly even; 1.0 without tokens)."""
    tokens = [sum(lengths[row] for part in parts for row in part) for parts in plan]
    return max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else 1.0


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    """Tokens of each sample, prompt and response."""
    return [len(sample.prompt) + len(sample.response) for sample in samples]


def pack(samples: Sequence[Sample], token_weight: Mapping[Component, float], kl_count: int) -> Batch:
    """One micro-batch that holds ``samples`` one behind the other.

    ``token_weight`` (coef_c / N_c per component) and ``kl_count`` must come from the whole step, over all micro-batches
    and data ranks; the step's loss is then the sum over all batches. Without samples the batch is one sequence of two
    tokens and zero weight, so that every rank has something to run.
    """
    unknown = sorted({sample.component for sample in samples} - set(token_weight))
    if unknown:
        raise ValueError(f"no token weight for the components {unknown}; there are weights for {sorted(token_weight)}")
    if kl_count < kl_token_count(samples):
        raise ValueError(f"kl_count={kl_count}: below the {kl_token_count(samples)} policy-gradient tokens given")
    lengths = lengths_of(samples) or [2]
    batch = _empty(lengths)
    for start, sample in zip(batch.cu_seqlens.tolist(), samples, strict=False):
        _write(batch, start, sample, token_weight[sample.component], 1.0 / kl_count if kl_count else 0.0)
    return batch


def _write(batch: Batch, start: int, sample: Sample, weight: float, kl_weight: float) -> None:
    if not sample.prompt or not sample.response:
        raise ValueError(f"a sample of {len(sample.prompt)} prompt and {len(sample.response)} response tokens")
    end = start + len(sample.prompt) + len(sample.response)
    batch.tokens[start:end] = torch.tensor(sample.prompt + sample.response)
    batch.labels[start : end - 1] = batch.tokens[start + 1 : end]
    # The token at position t is predicted at position t - 1.
    trained = slice(start + len(sample.prompt) - 1, end - 1)
    batch.weight[trained] = weight
    if sample.loss == "cross_entropy":
        batch.supervised[trained] = True
        return
    if len(sample.rollout_logprobs) != len(sample.response):
        raise ValueError(f"{len(sample.rollout_logprobs)} log-probs for {len(sample.response)} sampled tokens")
    batch.kl_weight[trained] = kl_weight
    batch.advantage[trained] = sample.advantage
    batch.rollout_logprobs[trained] = torch.tensor(sample.rollout_logprobs)
    batch.weight_version[trained] = sample.weight_version


def _empty(lengths: Sequence[int]) -> Batch:
    """Sequences of the given lengths that hold token 0 and train nothing."""
    tokens = sum(lengths)
    return Batch(
        cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        tokens=torch.zeros(tokens, dtype=torch.long),
        labels=torch.zeros(tokens, dtype=torch.long),
        weight=torch.zeros(tokens),
        kl_weight=torch.zeros(tokens),
        advantage=torch.zeros(tokens),
        supervised=torch.zeros(tokens, dtype=torch.bool),
        rollout_logprobs=torch.full((tokens,), float("nan")),
        weight_version=torch.full((tokens,), -1),
    )
