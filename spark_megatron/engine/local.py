"""This rank's part of a micro-batch: what context and sequence parallelism make of packed sequences.

With context parallelism each sequence is padded to a multiple of twice the degree and cut into as many chunks; rank r
holds chunks r and (2 * degree - 1 - r), so that causal attention costs every rank the same. This is the order that
megatron-core's rotary embedding and Transformer Engine's attention expect. With sequence parallelism the tokens of a
rank must divide by the tensor-parallel degree: a sequence of padding at the end sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from spark_megatron.engine.parallel import Parallel
from spark_megatron.types import Batch

SIMILAR = 0.75
"""Sequences attend side by side in one call if the shortest has at least this share of the longest one's length."""


@dataclass(frozen=True)
class Rows:
    """Sequences of similar length side by side, right-padded, for an attention that takes rectangles.

    ``query`` [rows, length] indexes this rank's tokens and ``key`` [rows, length] the tokens of all context ranks, rank
    by rank; padding indexes token 0. ``mask`` [rows, 1, queries, keys] is None where plain causality says the same.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None


@dataclass
class Packed(PackedSeqParams):
    """megatron-core's description of packed sequences, with the rectangles that attention on a CPU works on."""

    rows: tuple[Rows, ...] = ()
    back: Tensor | None = None
    """[tokens]: where each of this rank's tokens stands in the rectangles, laid flat one behind the other."""


@dataclass(frozen=True)
class Local:
    """This rank's tokens of a micro-batch. ``sources`` [context ranks, tokens] says which tokens of the whole batch
    each context rank holds (-1: padding)."""

    batch: Batch
    packed: Packed
    sources: Tensor
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


def place(batches: Sequence[Batch], parallel: Parallel) -> list[Local]:
    """This rank's part of each micro-batch under the layout of ``parallel``.

    Interleaved pipelines get all micro-batches of the same size, see ``model.transformer_config``.
    """
    layout = parallel.layout
    multiple = layout.tensor if layout.sequence else 1
    sizes = [sum(_padded(batch, layout.context, multiple, 0)[1]) for batch in batches]
    total = max(sizes) if layout.virtual > 1 else 0
    return [cut(batch, layout.context, parallel.context_rank, multiple, total) for batch in batches]


def cut(batch: Batch, context: int, rank: int, multiple: int, total: int = 0) -> Local:
    """The part of context rank ``rank`` of ``context``.

    Its number of tokens divides by ``multiple``; that of all context ranks together is at least ``total``.
    """
    lengths, padded = _padded(batch, context, multiple, total)
    positions = _positions(padded, context)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].repeat_interleave(torch.tensor(padded) // context)
    limits = torch.tensor(lengths).repeat_interleave(torch.tensor(padded) // context)
    sources = torch.where(positions < limits, starts + positions, -1)
    cu_seqlens = torch.tensor([0, *padded]).cumsum(0)
    rows, back = _rows(padded, positions, cu_seqlens, context, rank)
    device = batch.tokens.device
    packed = Packed(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens.to(torch.int32).to(device),
        cu_seqlens_kv=cu_seqlens.to(torch.int32).to(device),
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
        rows=rows,
        back=back,
    )
    local = _take(batch, sources[rank].to(device), (cu_seqlens // context).to(torch.int32).to(device))
    return Local(local, packed, sources.to(device), len(batch.tokens))


def _padded(batch: Batch, context: int, multiple: int, total: int) -> tuple[list[int], list[int]]:
    """Lengths of the sequences, and the same with padding; where needed, a sequence of nothing but padding at the end."""
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


def _rows(
    padded: list[int], positions: Tensor, cu_seqlens: Tensor, context: int, rank: int
) -> tuple[tuple[Rows, ...], Tensor]:
    """The rectangles of attention, longest sequences first, and where each local token stands in them."""
    local = positions.shape[1]
    # Where the tokens of all ranks, one rank behind the other, stand in the padded sequences; and the other way round.
    global_index = (cu_seqlens[:-1].repeat_interleave(torch.tensor(padded) // context) + positions).flatten()
    gathered = torch.empty_like(global_index).scatter_(0, global_index, torch.arange(len(global_index)))
    back = torch.empty(local, dtype=torch.long)
    rows: list[Rows] = []
    offset = 0
    for group in _similar(padded):
        longest = padded[group[0]]
        first, length = cu_seqlens[group][:, None], torch.tensor([padded[i] for i in group])[:, None]
        steps = torch.arange(longest)
        key = torch.where(steps < length, gathered[(first + steps).clamp(max=len(gathered) - 1)], 0)
        steps = torch.arange(longest // context)
        query = first // context + steps
        real = steps < length // context
        query = torch.where(real, query, 0)
        back[query[real]] = offset + torch.arange(real.numel()).view(real.shape)[real]
        offset += real.numel()
        mask = None
        if context > 1:
            mask = (positions[rank][query][:, :, None] >= torch.arange(longest))[:, None]
        rows.append(Rows(query, key, mask))
    return tuple(rows), back


def _similar(lengths: list[int]) -> list[list[int]]:
    """Indices grouped by similar length, longest first in each; empty sequences are left out."""
    groups: list[list[int]] = []
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        if groups and lengths[i] >= SIMILAR * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _take(batch: Batch, source: Tensor, cu_seqlens: Tensor) -> Batch:
    """The tokens of ``batch`` that ``source`` names; padding (-1) is token 0 and trains nothing."""
    if len(source) == len(batch.tokens) and len(cu_seqlens) == len(batch.cu_seqlens) and bool((source >= 0).all()):
        ordered = torch.equal(source, torch.arange(len(source), device=source.device))
        if ordered:
            return batch
    real = source >= 0
    index = source.clamp(min=0)
    taken = {name: torch.where(real, x[index], torch.zeros_like(x[:1])) for name, x in batch.per_token().items()}
    return Batch(cu_seqlens, **taken)
