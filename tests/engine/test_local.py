"""Cutting packed sequences for context and sequence parallelism, and attention on the rectangles that come out."""

import random
from collections import Counter

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from spark_megatron.algos.mismatch import Truncated, correct, sums
from spark_megatron.data.packing import pack
from spark_megatron.engine.local import SIMILAR, Local, cut
from spark_megatron.engine.modules import PackedAttention
from spark_megatron.runtime import combine
from spark_megatron.types import Batch, Sample

CUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
"""Context degree, and what the tokens of a rank must divide by."""


def batch_of(lengths: list[int]) -> Batch:
    """Sequences that end in one sampled token, each of weights of its own; every third one has no log-prob."""
    rng = random.Random(str(lengths))
    rows = []
    for i, length in enumerate(lengths):
        prompt = tuple(rng.randrange(1, 99) for _ in range(length - 1))
        logprobs = (-rng.random() if i % 3 else float("nan"),)
        response = (rng.randrange(1, 99),)
        rows.append(Sample(prompt, response, "policy", rollout_logprobs=logprobs, weight_version=i))
    return pack(rows, {"policy": 0.25}, len(rows))


LENGTHS = [[2], [7, 2, 3], [4, 4, 4, 4], [16, 5, 2, 9, 11, 13, 3], list(range(2, 40))]


@pytest.mark.parametrize(("context", "multiple"), CUTS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_token_is_on_one_context_rank_and_comes_back(lengths: list[int], context: int, multiple: int) -> None:
    batch = batch_of(lengths)
    parts = [cut(batch, context, rank, multiple) for rank in range(context)]
    assert Counter(s for s in parts[0].sources.flatten().tolist() if s >= 0) == Counter(range(len(batch.tokens)))
    for rank, part in enumerate(parts):
        assert torch.equal(part.sources, parts[0].sources)
        assert len(part.batch.tokens) % multiple == 0
        real = part.sources[rank] >= 0
        for name, tensor in batch.per_token().items():
            taken = part.batch.per_token()[name]
            torch.testing.assert_close(taken[real], tensor[part.sources[rank][real]], equal_nan=True)
        assert not part.batch.trained[~real].any()
        assert part.batch.cu_seqlens[-1] == len(part.batch.tokens)
        assert part.packed.cu_seqlens_q[-1] == len(part.batch.tokens) * context
    assert sum(float(part.batch.weight.sum()) for part in parts) == pytest.approx(0.25 * len(lengths))


def test_every_token_s_mismatch_is_counted_once() -> None:
    """What the context ranks sum, added up, is what the whole batch sums, per version: padding is in no version."""
    lengths = LENGTHS[-1]
    batch = batch_of(lengths)

    def summed(of: Batch) -> dict[str, float]:
        old = of.tokens.double() / -50
        return {key: float(x) for key, x in sums(of.trained, old, of.rollout_logprobs, of.weight_version).items()}

    parts = combine(summed(cut(batch, 4, rank, 2).batch) for rank in range(4))
    assert parts == pytest.approx(summed(batch))
    assert {int(key.split("@")[1]) for key in parts} == {i for i in range(len(lengths)) if i % 3}


def test_an_empty_microbatch_has_every_tensor_and_no_statistics() -> None:
    batch = batch_of([7, 3])
    batch.old_logprobs, batch.ref_logprobs = -torch.ones(10), -torch.ones(10)
    empty = batch.emptied()
    assert {name: x.dtype for name, x in empty.per_token().items()} == {
        name: x.dtype for name, x in batch.per_token().items()
    }
    assert not empty.trained.any()
    assert empty.old_logprobs is not None
    assert sums(empty.trained, empty.old_logprobs, empty.rollout_logprobs, empty.weight_version) == {}
    assert correct(empty, Truncated(cap=2.0)) == {}


def test_one_rank_without_padding_gets_the_batch_itself() -> None:
    batch = batch_of([5, 3])
    assert cut(batch, 1, 0, 1).batch is batch


def test_each_context_rank_holds_one_chunk_of_either_end() -> None:
    """megatron-core's order: 9 tokens are padded to 12, six chunks of two; rank 1 of 3 holds chunks 1 and 4."""
    batch = batch_of([9])
    assert cut(batch, 3, 1, 1).sources.tolist() == [[0, 1, -1, -1], [2, 3, 8, -1], [4, 5, 6, 7]]


def test_sequences_side_by_side_are_of_similar_length() -> None:
    lengths = list(range(2, 40))
    packed = cut(batch_of(lengths), 1, 0, 1).packed
    held = sum(rectangle.rows * rectangle.queries for rectangle in packed.rectangles)
    assert held <= sum(lengths) / SIMILAR
    assert len(packed.rectangles) < len(lengths) / 3


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("context", [1, 2])
def test_attention_is_that_of_each_sequence_alone(lengths: list[int], context: int) -> None:
    """Values and gradients against plain softmax; with two context ranks each takes keys and values of both."""
    batch = batch_of(lengths)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(batch.tokens), heads, 8, requires_grad=True) for heads in (4, 2, 2))
    expected = torch.cat([plain(*(x.split(lengths)[i] for x in (q, k, v))) for i in range(len(lengths))])
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)

    parts = [cut(batch, context, rank, 1) for rank in range(context)]
    keys, values = (torch.cat([taken(x, part, r) for r, part in enumerate(parts)]) for x in (k, v))
    found = torch.zeros_like(expected)
    for rank, part in enumerate(parts):
        real = part.sources[rank] >= 0
        out = attention()(taken(q, part, rank), keys, values, packed_seq_params=part.packed)
        found = found.index_put((part.sources[rank][real],), out[real])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(found, (q, k, v), grad), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def attention() -> PackedAttention:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8)
    return PackedAttention(config, 1)


def taken(x: torch.Tensor, part: Local, rank: int) -> torch.Tensor:
    source = part.sources[rank]
    # Padding holds large values: none of them may reach a real token.
    return torch.where((source >= 0)[:, None, None], x[source.clamp(min=0)], 50.0)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, d] of one sequence -> [tokens, heads * d]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)
