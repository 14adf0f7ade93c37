"""Which HF tensors make which parameter of a vLLM model, and what each of its tensor-parallel ranks holds.

The shapes are those in which vLLM's own loaders fill the parameters, before any kernel re-packs them. Plain data: vLLM
is not needed to read it.
"""

from __future__ import annotations

from dataclasses import replace

from spark_megatron.architecture import Architecture
from spark_megatron.slices import FIRST, LAST, Row, Segment, copy

_VOCABULARY_MULTIPLE = 64
"""vLLM pads embedding and head to a multiple of this (``vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE``)."""


def vllm_rows(model: Architecture) -> list[Row]:
    """All parameters in forward order; the experts of a layer are one row each of two parameters that hold all."""
    vocab = (model.vocab, model.hidden)
    embedding = copy("model.embed_tokens.weight", "model.embed_tokens.weight", FIRST, vocab, dim=0)
    embedding = replace(embedding, multiple=_VOCABULARY_MULTIPLE)
    rows = [embedding]
    for layer in range(model.layers):
        rows += _attention(model, layer) + (_experts if model.sparse[layer] else _mlp)(model, layer)
    rows.append(copy("model.norm.weight", "model.norm.weight", LAST, (model.hidden,)))
    if not model.tied:
        rows.append(replace(embedding, hf=("lm_head.weight",), pattern="lm_head.weight", place=LAST))
    return rows


def _attention(model: Architecture, layer: int) -> list[Row]:
    ours, theirs, h = "model.layers.{layer}.", f"model.layers.{layer}.", model.hidden

    def same(name: str, shape: tuple[int, ...], dim: int | None = None) -> Row:
        return copy(theirs + name, ours + name, layer, shape, dim=dim)

    rows = [same("input_layernorm.weight", (h,)), _qkv(model, layer, "weight", (h,))]
    if model.qkv_bias:
        rows.append(_qkv(model, layer, "bias", ()))
    if model.qk_norm:
        rows += [same(f"self_attn.{x}_norm.weight", (model.head_dim,)) for x in "qk"]
    rows.append(same("self_attn.o_proj.weight", (h, model.heads * model.head_dim), dim=1))
    rows.append(same("post_attention_layernorm.weight", (h,)))
    return rows


def _qkv(model: Architecture, layer: int, suffix: str, tail: tuple[int, ...]) -> Row:
    """All query heads, all key heads, all value heads; ranks beyond the key-value heads share them."""
    prefix = f"model.layers.{layer}.self_attn."
    heads = (model.heads, model.groups, model.groups)
    return Row(
        tuple(f"{prefix}{x}_proj.{suffix}" for x in "qkv"),
        tuple((n * model.head_dim, *tail) for n in heads),
        "model.layers.{layer}.self_attn.qkv_proj." + suffix,
        layer,
        tuple((Segment(tensor, 0, n * model.head_dim),) for tensor, n in enumerate(heads)),
        most=heads,
    )


def _gate_up(prefix: str, pattern: str, layer: int, shape: tuple[int, int], expert: int | None = None) -> Row:
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    blocks = tuple((Segment(tensor, 0, shape[0]),) for tensor in (0, 1))
    return Row(names, (shape, shape), pattern, layer, blocks, expert=expert)


def _mlp(model: Architecture, layer: int) -> list[Row]:
    ours, theirs = "model.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    return [
        _gate_up(theirs, ours + "gate_up_proj.weight", layer, (model.ffn, model.hidden)),
        copy(theirs + "down_proj.weight", ours + "down_proj.weight", layer, (model.hidden, model.ffn), dim=1),
    ]


def _experts(model: Architecture, layer: int) -> list[Row]:
    ours, theirs, h = "model.layers.{layer}.mlp.", f"model.layers.{layer}.mlp.", model.hidden
    rows = [copy(theirs + "gate.weight", ours + "gate.weight", layer, (model.experts, h))]
    fused = ours + "experts.routed_experts."
    for e in range(model.experts):
        one = f"{theirs}experts.{e}."
        rows.append(_gate_up(one, fused + "w13_weight", layer, (model.expert_ffn, h), e))
        down = one + "down_proj.weight"
        rows.append(copy(down, fused + "w2_weight", layer, (h, model.expert_ffn), dim=1, expert=e))
    return rows
