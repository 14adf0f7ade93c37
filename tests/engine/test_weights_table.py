"""The weight table without any process group: every element of every HF tensor has one place, and the right one."""

import math

import pytest
import torch
from torch import Tensor

from spark_megatron.architecture import Architecture
from spark_megatron.engine.parallel import Layout
from spark_megatron.engine.weights.home import home, shard_shapes
from spark_megatron.engine.weights.stream import assemble
from spark_megatron.engine.weights.table import elements, gate_up, qkv, table
from spark_megatron.slices import LAST, Row
from tests.tiny_models import CONFIGS, VOCAB

FAMILIES = ("llama", "qwen2", "qwen2_untied", "qwen3", "qwen3_moe", "qwen3_moe_mixed")


def architecture(name: str) -> Architecture:
    return Architecture.of(CONFIGS[name].to_dict())


def rows_of(name: str, fused: bool = False) -> list[Row]:
    return table(architecture(name), fused=fused)


def numbered(row: Row) -> list[Tensor]:
    """Tensors of the row's HF shapes whose elements are all different and none 0 (what padding holds)."""
    tensors, start = [], 1
    for shape in row.shapes:
        tensors.append(torch.arange(start, start + math.prod(shape)).view(shape))
        start += math.prod(shape)
    return tensors


def shard(row: Row, tensors: list[Tensor], tp: int, rank: int) -> Tensor:
    """What tensor-parallel rank ``rank`` holds, put together from the row's segments."""
    parameter = torch.zeros(row.shard_shape(tp), dtype=torch.long)
    for offset, segment in row.segments(tp, rank):
        part = tensors[segment.tensor].narrow(row.dim, segment.start, len(segment))
        parameter.narrow(row.dim, offset, len(segment)).copy_(part)
    return parameter


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_hold_every_element_once_and_come_back_bitwise(family: str, tp: int) -> None:
    for row in rows_of(family):
        tensors = numbered(row)
        shards = [shard(row, tensors, tp, rank) for rank in range(tp)]
        held = torch.cat([x.flatten() for x in (shards if row.cut else shards[:1])])
        assert held[held != 0].sort().values.tolist() == list(range(1, row.elements + 1))
        assert all(torch.equal(a, b) for a, b in zip(assemble(row, shards), tensors, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_model_has_one_row(family: str, fused: bool, model_directory) -> None:
    from safetensors import safe_open

    rows = rows_of(family, fused)
    with safe_open(model_directory(family) / "model.safetensors", "pt") as file:
        names = file.keys()
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    found = [pair for row in rows if row.exported for pair in zip(row.hf, row.shapes, strict=True)]
    assert dict(found) == shapes
    assert len(found) == len(shapes)
    assert len({row.full_name for row in rows}) == len(rows)
    assert elements(rows) == sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize(
    ("dense", "step", "sparse"),
    [([], 1, [0, 1, 2, 3, 4, 5]), ([], 2, [1, 3, 5]), ([1, 4], 1, [0, 2, 3, 5]), ([3], 2, [1, 5]), ([], 4, [3])],
)
def test_sparse_layers_are_those_of_transformers(dense: list[int], step: int, sparse: list[int]) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    settings = CONFIGS["qwen3_moe"].to_dict() | {"num_hidden_layers": 6}
    config = Qwen3MoeConfig(**settings | {"mlp_only_layers": dense, "decoder_sparse_step": step})
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    assert [i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")] == sparse
    assert [i for i, is_sparse in enumerate(Architecture.of(config.to_dict()).sparse) if is_sparse] == sparse


def one_row(family: str, ending: str) -> Row:
    return next(row for row in rows_of(family) if row.full_name.endswith(ending))


def test_each_group_holds_its_queries_then_its_key_then_its_value() -> None:
    """megatron-core's order for 4 query heads in 2 groups: q0 q1 k0 v0 | q2 q3 k1 v1; cut inside of a group for 4."""
    row = one_row("qwen3", "layers.0.self_attention.linear_qkv.weight")
    q, k, v = numbered(row)
    assert (q.shape, k.shape) == ((128, 64), (64, 64)), "heads of 32, although hidden / heads is 16"
    heads = [*q.split(32), *k.split(32), *v.split(32)]
    whole = torch.cat([heads[i] for i in (0, 1, 4, 6, 2, 3, 5, 7)])
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            assert torch.equal(shard(row, [q, k, v], tp, rank), whole.chunk(tp)[rank])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_are_interleaved_like_weights(tp: int) -> None:
    model = architecture("qwen2")
    weight, bias = (qkv("p.", kind, "x", 0, model, tail) for kind, tail in (("weight", (128,)), ("bias", ())))
    for rank in range(tp):
        assert list(weight.segments(tp, rank)) == list(bias.segments(tp, rank))
    assert bias.shard_shape(tp) == weight.shard_shape(tp)[:1]


@pytest.mark.parametrize("expert", [None, 3])
def test_each_shard_holds_its_part_of_gate_then_its_part_of_up(expert: int | None) -> None:
    row = gate_up("p.", "x", 0, (6, 5), expert)
    gate, up = numbered(row)
    assert torch.equal(shard(row, [gate, up], 2, 0), torch.cat([gate[:3], up[:3]]))
    assert torch.equal(shard(row, [gate, up], 2, 1), torch.cat([gate[3:], up[3:]]))


@pytest.mark.parametrize(("tp", "padding"), [(1, 0), (2, 1), (4, 3)])
def test_vocabulary_is_padded_for_the_ranks_only(tp: int, padding: int) -> None:
    for row in (one_row("llama", "word_embeddings.weight"), one_row("llama", "output_layer.weight")):
        [tensor] = numbered(row)
        whole = torch.cat([shard(row, [tensor], tp, rank) for rank in range(tp)])
        assert torch.equal(whole[:VOCAB], tensor)
        assert whole.shape[0] == VOCAB + padding
        assert not whole[VOCAB:].any()


def test_a_tied_head_is_loaded_but_not_exported() -> None:
    tied = [row for row in rows_of("qwen2") if not row.exported]
    assert [(row.hf, row.full_name, row.place) for row in tied] == [
        (("model.embed_tokens.weight",), "output_layer.weight", LAST)
    ]
    assert all(row.exported for row in rows_of("qwen2_untied"))


def test_names_of_transformer_engine() -> None:
    """Norms fused into the linear layer behind them, but for the one before a router; experts in one grouped module."""
    found = {row.hf[0]: row.full_name for row in rows_of("qwen3_moe_mixed", fused=True)}
    sparse, dense = "decoder.layers.0.", "decoder.layers.1."
    expected = {
        "model.layers.0.input_layernorm.weight": sparse + "self_attention.linear_qkv.layer_norm_weight",
        "model.layers.0.self_attn.q_norm.weight": sparse + "self_attention.q_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight": sparse + "pre_mlp_layernorm.weight",
        "model.layers.0.mlp.gate.weight": sparse + "mlp.router.weight",
        "model.layers.0.mlp.experts.3.gate_proj.weight": sparse + "mlp.experts.linear_fc1.weight3",
        "model.layers.0.mlp.experts.3.down_proj.weight": sparse + "mlp.experts.linear_fc2.weight3",
        "model.layers.1.post_attention_layernorm.weight": dense + "mlp.linear_fc1.layer_norm_weight",
        "model.layers.1.mlp.gate_proj.weight": dense + "mlp.linear_fc1.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
    }
    assert expected.items() <= found.items()
    plain = rows_of("qwen3_moe_mixed")
    for ours, theirs in zip(plain, rows_of("qwen3_moe_mixed", fused=True), strict=True):
        assert (ours.hf, ours.shard_shape(2), list(ours.segments(2, 1))) == (
            theirs.hf,
            theirs.shard_shape(2),
            list(theirs.segments(2, 1)),
        )


def test_interleaved_stages_hold_every_other_chunk() -> None:
    """8 layers on 2 stages of 2 chunks: stage 0 has [0, 1] and [4, 5], stage 1 has [2, 3] and [6, 7]."""
    config = CONFIGS["qwen3"].to_dict() | {"num_hidden_layers": 8}
    model, layout = Architecture.of(config), Layout(pipeline=2, virtual=2)
    found: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for row in table(model, fused=False):
        if row.full_name.endswith("input_layernorm.weight"):
            at = home(row, model, layout)
            found.setdefault((at.stage, at.chunk), []).append((int(row.place), at.name.split(".")[2]))
    assert found == {
        (0, 0): [(0, "0"), (1, "1")],
        (1, 0): [(2, "0"), (3, "1")],
        (0, 1): [(4, "0"), (5, "1")],
        (1, 1): [(6, "0"), (7, "1")],
    }


def test_each_expert_rank_counts_its_experts_from_0() -> None:
    model = architecture("qwen3_moe")
    names = [[n for n in shard_shapes(model, Layout(expert=2), 0, rank)[0] if "local_experts" in n] for rank in (0, 1)]
    assert names[0] == names[1]
    places = [home(row, model, Layout(expert=2)) for row in rows_of("qwen3_moe") if row.expert is not None][:8]
    assert [at.expert_rank for at in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [at.name.split(".")[6] for at in places] == ["0", "0", "1", "1", "0", "0", "1", "1"]
