"""One declarative table per model: which HF tensors make which megatron-core parameter, and how it is cut.

Loading, export to HF, the hand-over to the sampler and the shapes of every rank's parameters are all derived from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_megatron.architecture import Architecture
from spark_megatron.slices import FIRST, LAST, Row, Segment, Shape, copy


def qkv(prefix: str, suffix: str, pattern: str, layer: int, model: Architecture, tail: Shape) -> Row:
    """Query, key and value: megatron-core holds, per key-value head, [its query heads, the key head, the value head].

    The whole is cut into equal parts, inside of a head too where there are fewer key-value heads than ranks
    (``SelfAttention.get_query_key_value_tensors``).
    """
    d, queries = model.head_dim, model.heads // model.groups * model.head_dim
    block: list[Segment] = []
    for g in range(model.groups):
        block.append(Segment(0, g * queries, (g + 1) * queries))
        block += [Segment(tensor, g * d, (g + 1) * d) for tensor in (1, 2)]
    names = tuple(f"{prefix}{x}_proj.{suffix}" for x in "qkv")
    shapes = tuple((heads * d, *tail) for heads in (model.heads, model.groups, model.groups))
    return Row(names, shapes, pattern, layer, (tuple(block),))


def gate_up(prefix: str, pattern: str, layer: int, shape: Shape, expert: int | None = None) -> Row:
    """Gate and up projection stacked; each tensor-parallel rank holds [its part of gate, its part of up]."""
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    blocks = tuple((Segment(tensor, 0, shape[0]),) for tensor in (0, 1))
    return Row(names, (shape, shape), pattern, layer, blocks, expert=expert)


def down(prefix: str, pattern: str, layer: int, shape: Shape, expert: int | None = None) -> Row:
    """The down projection, cut along its input."""
    return Row(
        (f"{prefix}down_proj.weight",), (shape,), pattern, layer, ((Segment(0, 0, shape[1]),),), 1, expert=expert
    )


def _mlp_rows(model: Architecture, i: int, fused: bool) -> list[Row]:
    ours, theirs, h = "decoder.layers.{layer}.mlp.", f"model.layers.{i}.mlp.", model.hidden
    if not model.sparse[i]:
        return [
            gate_up(theirs, ours + "linear_fc1.weight", i, (model.ffn, h)),
            down(theirs, ours + "linear_fc2.weight", i, (h, model.ffn)),
        ]
    rows = [copy(theirs + "gate.weight", ours + "router.weight", i, (model.experts, h))]
    names = "experts.linear_{fc}.weight{{expert}}" if fused else "experts.local_experts.{{expert}}.linear_{fc}.weight"
    for e in range(model.experts):
        one = f"{theirs}experts.{e}."
        rows.append(gate_up(one, ours + names.format(fc="fc1"), i, (model.expert_ffn, h), expert=e))
        rows.append(down(one, ours + names.format(fc="fc2"), i, (h, model.expert_ffn), expert=e))
    return rows


def _layer_rows(model: Architecture, i: int, fused: bool) -> list[Row]:
    ours, theirs, h = "decoder.layers.{layer}.", f"model.layers.{i}.", model.hidden
    attention, wide = theirs + "self_attn.", model.heads * model.head_dim
    before_attention = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    # The router of a sparse layer reads what the norm gives, so that the norm stays a module of its own there.
    before_mlp = "mlp.linear_fc1.layer_norm_weight" if fused and not model.sparse[i] else "pre_mlp_layernorm.weight"
    linear_qkv = ours + "self_attention.linear_qkv."
    rows = [
        copy(theirs + "input_layernorm.weight", ours + before_attention, i, (h,)),
        qkv(attention, "weight", linear_qkv + "weight", i, model, (h,)),
    ]
    if model.qkv_bias:
        rows.append(qkv(attention, "bias", linear_qkv + "bias", i, model, ()))
    if model.qk_norm:
        for x in "qk":
            norm = f"self_attention.{x}_layernorm.weight"
            rows.append(copy(f"{attention}{x}_norm.weight", ours + norm, i, (model.head_dim,)))
    rows.append(copy(attention + "o_proj.weight", ours + "self_attention.linear_proj.weight", i, (h, wide), dim=1))
    rows.append(copy(theirs + "post_attention_layernorm.weight", ours + before_mlp, i, (h,)))
    return rows + _mlp_rows(model, i, fused)


def table(model: Architecture, *, fused: bool) -> list[Row]:
    """All rows of a model in forward order; ``fused`` gives the names of Transformer Engine's layers."""
    vocab = (model.vocab, model.hidden)
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    rows = [copy("model.embed_tokens.weight", embedding, FIRST, vocab, dim=0)]
    for i in range(model.layers):
        rows += _layer_rows(model, i, fused)
    rows.append(copy("model.norm.weight", "decoder.final_layernorm.weight", LAST, (model.hidden,)))
    if model.scalar:
        rows.append(copy("score.weight", head, LAST, (1, model.hidden)))
    elif model.tied:
        # With pipeline stages the last one keeps its own copy of the embedding; it is loaded, never exported.
        rows.append(copy("model.embed_tokens.weight", head, LAST, vocab, dim=0, exported=False))
    else:
        rows.append(copy("lm_head.weight", head, LAST, vocab, dim=0))
    return rows


def elements(rows: Sequence[Row]) -> int:
    """Parameters of the model, each counted once."""
    return sum(row.elements for row in rows if row.exported)
