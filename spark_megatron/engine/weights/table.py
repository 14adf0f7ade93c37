"""One declarative table per model: which HF tensors make which megatron-core parameter, and how it is split.

A row knows both directions. ``join`` turns the HF tensors into the full megatron-core parameter, ``split`` undoes it;
``shard`` cuts a full parameter for tensor parallelism, ``unshard`` undoes it. Loading, export to HF and the hand-over
to the sampler are all derived from these four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

FIRST, LAST = "first", "last"
"""Places of rows that belong to a pipeline end rather than to a layer."""

Place = int | str


class Row(Protocol):
    """What every row offers.

    ``place`` is the global layer index, or the pipeline end that holds the parameter; ``dim`` the dimension that tensor
    parallelism cuts (None: replicated); ``exported`` is False for a second copy of another row's tensor.
    """

    @property
    def hf(self) -> tuple[str, ...]: ...
    @property
    def mcore(self) -> str: ...
    @property
    def place(self) -> Place: ...
    @property
    def dim(self) -> int | None: ...
    @property
    def exported(self) -> bool: ...
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]: ...
    def join(self, tensors: Sequence[Tensor], tp: int) -> Tensor: ...
    def split(self, full: Tensor) -> tuple[Tensor, ...]: ...
    def shard(self, full: Tensor, tp: int, rank: int) -> Tensor: ...
    def unshard(self, shards: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Copy:
    """One tensor, the same on both sides; cut along ``dim`` for tensor parallelism (None: replicated)."""

    name: str
    mcore: str
    place: Place
    shape: tuple[int, ...]
    dim: int | None = None
    exported: bool = True

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.name,)

    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)

    def join(self, tensors: Sequence[Tensor], tp: int) -> Tensor:
        return tensors[0]

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return (full,)

    def shard(self, full: Tensor, tp: int, rank: int) -> Tensor:
        return full if self.dim is None else full.chunk(tp, self.dim)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if self.dim is None else torch.cat(list(shards), self.dim)


@dataclass(frozen=True)
class Vocab(Copy):
    """Embedding or head: rows are padded to a multiple of the tensor-parallel degree; the padding is never exported."""

    dim: int | None = 0

    def join(self, tensors: Sequence[Tensor], tp: int) -> Tensor:
        rows = -(-self.shape[0] // tp) * tp
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, rows - self.shape[0]))

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return (full[: self.shape[0]],)


@dataclass(frozen=True)
class QKV:
    """Query, key and value: per group of ``heads // groups`` query heads, megatron-core holds [queries, key, value]."""

    prefix: str
    suffix: str
    mcore: str
    place: Place
    heads: int
    groups: int
    head_dim: int
    tail: tuple[int, ...]
    """Shape behind the output dimension: (hidden,) for a weight, () for a bias."""
    dim: int | None = 0
    exported: bool = True

    @property
    def hf(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}{x}_proj.{self.suffix}" for x in "qkv")

    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple((n * self.head_dim, *self.tail) for n in (self.heads, self.groups, self.groups))

    def join(self, tensors: Sequence[Tensor], tp: int) -> Tensor:
        return torch.cat([t.view(self.groups, -1, *self.tail) for t in tensors], 1).flatten(0, 1)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        sizes = [self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim]
        parts = full.view(self.groups, -1, *self.tail).split(sizes, 1)
        return tuple(part.flatten(0, 1) for part in parts)

    def shard(self, full: Tensor, tp: int, rank: int) -> Tensor:
        return full.chunk(tp)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))


@dataclass(frozen=True)
class GateUp:
    """Gate and up projection stacked; each tensor-parallel rank holds [its part of gate, its part of up]."""

    prefix: str
    mcore: str
    place: Place
    shape: tuple[int, int]
    dim: int | None = 0
    exported: bool = True

    @property
    def hf(self) -> tuple[str, ...]:
        return f"{self.prefix}gate_proj.weight", f"{self.prefix}up_proj.weight"

    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.shape, self.shape

    def join(self, tensors: Sequence[Tensor], tp: int) -> Tensor:
        return torch.cat(list(tensors))

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return full.chunk(2)

    def shard(self, full: Tensor, tp: int, rank: int) -> Tensor:
        return torch.cat([half.chunk(tp)[rank] for half in full.chunk(2)])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])


def _layer_rows(hf: PreTrainedConfig, i: int, head_dim: int) -> list[Row]:
    ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    heads, groups, hidden, ffn = hf.num_attention_heads, hf.num_key_value_heads, hf.hidden_size, hf.intermediate_size
    qkv = ours + "self_attention.linear_qkv."
    rows: list[Row] = [
        Copy(theirs + "input_layernorm.weight", ours + "input_layernorm.weight", i, (hidden,)),
        QKV(attention, "weight", qkv + "weight", i, heads, groups, head_dim, (hidden,)),
        Copy(
            attention + "o_proj.weight",
            ours + "self_attention.linear_proj.weight",
            i,
            (hidden, heads * head_dim),
            dim=1,
        ),
        Copy(theirs + "post_attention_layernorm.weight", ours + "pre_mlp_layernorm.weight", i, (hidden,)),
        GateUp(mlp, ours + "mlp.linear_fc1.weight", i, (ffn, hidden)),
        Copy(mlp + "down_proj.weight", ours + "mlp.linear_fc2.weight", i, (hidden, ffn), dim=1),
    ]
    if hf.model_type == "qwen2":
        rows.append(QKV(attention, "bias", qkv + "bias", i, heads, groups, head_dim, ()))
    if hf.model_type == "qwen3":
        for x in "qk":
            norm = f"self_attention.{x}_layernorm.weight"
            rows.append(Copy(f"{attention}{x}_norm.weight", ours + norm, i, (head_dim,)))
    return rows


def table(hf: PreTrainedConfig) -> list[Row]:
    """All rows of a model in forward order; layer indices are global."""
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    vocab = (hf.vocab_size, hf.hidden_size)
    rows: list[Row] = [Vocab("model.embed_tokens.weight", "embedding.word_embeddings.weight", FIRST, vocab)]
    for i in range(hf.num_hidden_layers):
        rows += _layer_rows(hf, i, head_dim)
    rows.append(Copy("model.norm.weight", "decoder.final_layernorm.weight", LAST, (hf.hidden_size,)))
    if hf.tie_word_embeddings:
        # With pipeline stages the last one keeps its own copy of the embedding; it is loaded, never exported.
        rows.append(Vocab("model.embed_tokens.weight", "output_layer.weight", LAST, vocab, exported=False))
    else:
        rows.append(Vocab("lm_head.weight", "output_layer.weight", LAST, vocab))
    return rows
