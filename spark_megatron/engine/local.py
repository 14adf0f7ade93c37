"""This rank's part of a micro-batch: what context and sequence parallelism make of packed sequences.

With context parallelism each sequence is padded to a multiple of twice the degree and cut into as many chunks; rank r
holds chunks r and (2 * degree - 1 - r), so that causal attention costs every rank the same. This is the order that
megatron-core's rotary embedding and Transformer Engine's attention expect. With sequence parallelism the tokens of a
rank must divide by the tensor-parallel degree: a sequence of padding at the end sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from spark_megatron.engine.parallel import Parallel
from spark_megatron.types import Sequences

SIMILAR = 0.75
"""Sequences attend side by side in one call if the shortest has at least this share of the longest one's length."""


@dataclass(frozen=True)
class Rectangle:
    """Sequences of similar length side by side, padded on the right, for an attention that takes rectangles.

    ``mask`` [rows, 1, queries, keys] is None where plain causality says the same.
    """

    rows: int
    queries: int
    keys: int
    mask: Tensor | None


@dataclass
class Packed(PackedSeqParams):
    """megatron-core's description of packed sequences, with what attention and rotary embeddings on a CPU work on.

    A cell is a place in the rectangles, laid flat one behind the other: ``query_cells`` [tokens] says which one each of
    this rank's tokens has, ``key_cells`` the same for the tokens of all context ranks, rank by rank.
    """

    rectangles: tuple[Rectangle, ...] = ()
    query_cells: Tensor | None = None
    key_cells: Tensor | None = None
    positions: Tensor | None = None
    """[tokens]: where each of this rank's tokens stands in its sequence."""


@dataclass(frozen=True)
class Local:
    """This rank's tokens of a micro-batch. ``sources`` [context ranks, tokens] says which tokens of the whole batch
    each context rank holds (-1: padding), ``ends`` [sequences] where among this rank's tokens a sequence's last one is
    (-1: with another rank)."""

    batch: Sequences
    packed: Packed
    sources: Tensor
    ends: Tensor
    whole: int

    def gather(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[tokens of this rank] -> [tokens of the whole batch], on every context rank. A collective."""
        if group.size() == 1:
            return values[: self.whole]
        everyone = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(everyone, values.contiguous(), group=group)
        real = self.sources >= 0
        out = values.new_empty(self.whole)
        out[self.sources[real]] = torch.stack(everyone)[real]
        return out


def place(batches: Sequence[Sequences], parallel: Parallel) -> list[Local]:
    """This rank's part of each micro-batch under the layout of ``parallel``.

    Interleaved pipelines get all micro-batches of the same size, see ``model.transformer_config``.
    """
    layout = parallel.layout
    multiple = layout.tensor if layout.sequence else 1
    sizes = [sum(_padded(batch, layout.context, multiple, 0)[1]) for batch in batches]
    total = max(sizes) if layout.virtual > 1 else 0
    return [cut(batch, layout.context, parallel.context_rank, multiple, total) for batch in batches]


def cut(batch: Sequences, context: int, rank: int, multiple: int, total: int = 0) -> Local:
    """The part of context rank ``rank`` of ``context``.

    Its number of tokens divides by ``multiple``; that of all context ranks together is at least ``total``.
    """
    lengths, padded = _padded(batch, context, multiple, total)
    positions = _positions(padded, context)
    sequences = torch.arange(len(padded)).repeat_interleave(torch.tensor(padded) // context)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1][sequences]
    limits = torch.tensor(lengths)[sequences]
    sources = torch.where(positions < limits, starts + positions, -1)
    cu_seqlens = torch.tensor([0, *padded]).cumsum(0)
    device = batch.tokens.device
    rectangles, query_cells, key_cells = _rectangles(padded, positions, rank, device)
    packed = Packed(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens.to(torch.int32).to(device),
        cu_seqlens_kv=cu_seqlens.to(torch.int32).to(device),
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
        rectangles=rectangles,
        query_cells=query_cells.to(device),
        key_cells=key_cells.to(device),
        positions=positions[rank].to(device),
    )
    local = _take(batch, sources[rank].to(device), (cu_seqlens // context).to(torch.int32).to(device))
    last = (positions[rank] == limits - 1).nonzero()[:, 0]
    ends = torch.full((len(batch.cu_seqlens) - 1,), -1).index_copy_(0, sequences[last], last)
    return Local(local, packed, sources.to(device), ends.to(device), len(batch.tokens))


def _padded(batch: Sequences, context: int, multiple: int, total: int) -> tuple[list[int], list[int]]:
    """Lengths of the sequences, and the same with padding; where needed, a last sequence of nothing but padding."""
    lengths = batch.cu_seqlens.diff().tolist()
    chunks = 2 * context if context > 1 else 1
    padded = [-(-length // chunks) * chunks for length in lengths]
    extra = max(0, total - sum(padded))
    while (sum(padded) + extra) % (context * multiple):
        extra += chunks
    return ([*lengths, 0], [*padded, extra]) if extra else (lengths, padded)


def _positions(padded: list[int], context: int) -> Tensor:
    """[context, tokens of a rank]: the position in its sequence of each token."""
    if context == 1:
        return torch.cat([torch.arange(length) for length in padded])[None]
    ranks = []
    for rank in range(context):
        parts = []
        for length in padded:
            chunk = length // (2 * context)
            parts += [torch.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * context - 1 - rank)]
        ranks.append(torch.cat(parts))
    return torch.stack(ranks)


def _rectangles(
    padded: list[int], positions: Tensor, rank: int, device: torch.device
) -> tuple[tuple[Rectangle, ...], Tensor, Tensor]:
    """The rectangles of attention, longest sequences first, and the cells of queries and of keys."""
    context = len(positions)
    groups = _similar(padded)
    first_query, first_key = [0] * len(padded), [0] * len(padded)
    queries = keys = 0
    for group in groups:
        for i in group:
            first_query[i], first_key[i] = queries, keys
            queries, keys = queries + padded[group[0]] // context, keys + padded[group[0]]
    lengths = torch.tensor(padded) // context
    # A sequence's tokens are in order on a rank, though not in one piece of the sequence.
    ahead = torch.tensor(first_query) - (lengths.cumsum(0) - lengths)
    query_cells = ahead.repeat_interleave(lengths) + torch.arange(positions.shape[1])
    key_cells = (torch.tensor(first_key).repeat_interleave(lengths) + positions).flatten()
    at = torch.zeros(queries, dtype=torch.long).index_copy_(0, query_cells, positions[rank])
    rectangles = []
    for group in groups:
        rows, longest, start = len(group), padded[group[0]], first_query[group[0]]
        mask = None
        if context > 1:
            own = at[start : start + rows * longest // context].view(rows, -1)
            mask = (own[:, :, None] >= torch.arange(longest))[:, None].to(device)
        rectangles.append(Rectangle(rows, longest // context, longest, mask))
    return tuple(rectangles), query_cells, key_cells


def _similar(lengths: list[int]) -> list[list[int]]:
    """Indices grouped by similar length, longest first in each; empty sequences are left out."""
    groups: list[list[int]] = []
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        if groups and lengths[i] >= SIMILAR * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _take(batch: Sequences, source: Tensor, cu_seqlens: Tensor) -> Sequences:
    """The tokens of ``batch`` that ``source`` names; padding (-1) is token 0 and trains nothing."""
    if len(source) == len(batch.tokens) and len(cu_seqlens) == len(batch.cu_seqlens) and bool((source >= 0).all()):
        ordered = torch.equal(source, torch.arange(len(source), device=source.device))
        if ordered:
            return batch
    real = source >= 0
    index = source.clamp(min=0)
    taken = {name: torch.where(real, x[index], torch.zeros_like(x[:1])) for name, x in batch.per_token().items()}
    return replace(batch, cu_seqlens=cu_seqlens, **taken)
