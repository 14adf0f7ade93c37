"""The weight table without any process group: every element of every HF tensor has one place, and the right one."""

import pytest
import torch

from spark_megatron.engine.weights.table import QKV, GateUp, Row, table
from tests.tiny_models import CONFIGS, VOCAB

FAMILIES = ("llama", "qwen2", "qwen2_untied", "qwen3")


def numbered(row: Row) -> list[torch.Tensor]:
    """Tensors of the row's HF shapes whose elements are all different and none 0 (what padding holds)."""
    tensors, start = [], 1
    for shape in row.hf_shapes():
        size = torch.Size(shape).numel()
        tensors.append(torch.arange(start, start + size).view(shape))
        start += size
    return tensors


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_hold_every_element_once_and_come_back_bitwise(family: str, tp: int) -> None:
    for row in table(CONFIGS[family]):
        tensors = numbered(row)
        full = row.join(tensors, tp)
        shards = [row.shard(full, tp, rank) for rank in range(tp)]
        held = torch.cat([shard.flatten() for shard in (shards if row.dim is not None else shards[:1])])
        elements = sum(tensor.numel() for tensor in tensors)
        assert held[held != 0].sort().values.tolist() == list(range(1, elements + 1))
        assert len({shard.shape for shard in shards}) == 1
        back = row.split(row.unshard(shards))
        assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_model_is_exported_once(family: str, model_directory) -> None:
    from safetensors import safe_open

    with safe_open(model_directory(family) / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
    rows = table(CONFIGS[family])
    assert sorted(name for row in rows if row.exported for name in row.hf) == names
    assert len({row.mcore for row in rows}) == len(rows)


def test_each_group_holds_its_queries_then_its_key_then_its_value() -> None:
    """megatron-core's order for 4 query heads in 2 groups: q0 q1 k0 v0 | q2 q3 k1 v1."""
    row = QKV("p.", "weight", "x", 0, heads=4, groups=2, head_dim=3, tail=(5,))
    q, k, v = numbered(row)
    heads = [*q.split(3), *k.split(3), *v.split(3)]
    expected = torch.cat([heads[i] for i in (0, 1, 4, 6, 2, 3, 5, 7)])
    assert torch.equal(row.join([q, k, v], 1), expected)
    assert torch.equal(row.shard(expected, 2, 1), expected[12:])


def test_each_shard_holds_its_part_of_gate_then_its_part_of_up() -> None:
    row = GateUp("p.", "x", 0, (6, 5))
    gate, up = numbered(row)
    full = row.join([gate, up], 2)
    assert torch.equal(row.shard(full, 2, 0), torch.cat([gate[:3], up[:3]]))
    assert torch.equal(row.shard(full, 2, 1), torch.cat([gate[3:], up[3:]]))


def test_vocabulary_is_padded_for_the_ranks_only() -> None:
    for row in (r for r in table(CONFIGS["llama"]) if r.hf[0] in ("model.embed_tokens.weight", "lm_head.weight")):
        full = row.join(numbered(row), 2)
        assert full.shape[0] == VOCAB + 1
        assert not full[VOCAB:].any()
        assert row.split(full)[0].shape[0] == VOCAB


def test_a_tied_head_is_loaded_but_not_exported() -> None:
    tied = [row for row in table(CONFIGS["qwen2"]) if not row.exported]
    assert [(row.hf, row.mcore) for row in tied] == [(("model.embed_tokens.weight",), "output_layer.weight")]
    assert all(row.exported for row in table(CONFIGS["qwen2_untied"]))
