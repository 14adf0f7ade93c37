"""Weights in blocks of FP8: values and scales against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from spark_megatron.architecture import Architecture
from spark_megatron.rollout import fp8
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.slices import Row, Segment, copy


def test_each_block_has_the_scale_of_its_largest_weight() -> None:
    weight = torch.zeros(256, 256)
    weight[0, 0], weight[0, 128], weight[255, 0] = 448.0, -44.8, 2.0
    values, scale = fp8.quantise(weight)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert scale.tolist() == [[1.0, pytest.approx(0.1)], [pytest.approx(2 / 448), 1.0]], "a block of zeros has scale 1"
    assert values[0, 0].item() == 448.0
    assert values[0, 128].item() == -448.0
    assert values[255, 0].item() == 448.0


def test_values_round_to_three_bits_of_mantissa_and_ties_to_even() -> None:
    """Between 16 and 32 the format has a value every 2: 17 lies between 16 and 18, and 16 has the even mantissa."""
    weight = torch.zeros(1, 128)
    weight[0, :6] = torch.tensor([448.0, 17.0, 19.0, 17.1, -17.0, 2.0**-10])
    values, _ = fp8.quantise(weight)
    assert values[0, :6].tolist() == [448.0, 16.0, 20.0, 18.0, -16.0, 0.0]


@pytest.mark.parametrize("shape", [(128, 128), (200, 130), (1, 1), (3, 256, 129)])
def test_any_shape_comes_back_within_the_rounding(shape: tuple[int, ...]) -> None:
    """Half a unit of three mantissa bits is 1/16 of the value; below 2^-6, the smallest normal, it is 2^-10 scales."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values, scale = fp8.quantise(weight)
    assert scale.shape == (*shape[:-2], math.ceil(shape[-2] / 128), math.ceil(shape[-1] / 128))
    error = (fp8.dequantise(values, scale) - weight).abs()
    assert (error <= weight.abs() / 16 + scale.max() * 2**-10).all()
    assert error.max() > 0 or weight.numel() == 1, "the largest value of a block is exact"


def test_blocks_do_not_touch_each_other() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    values, scale = fp8.quantise(weight)
    alone, its_scale = fp8.quantise(weight[128:, 256:])
    assert torch.equal(values[128:, 256:].float(), alone.float())
    assert scale[1, 2] == its_scale[0, 0]


def test_extreme_weights_stay_finite() -> None:
    for largest in (torch.finfo(torch.float32).max, 1e-30, torch.finfo(torch.float32).tiny):
        values, scale = fp8.quantise(torch.full((2, 2), largest))
        assert values.float().isfinite().all()
        assert fp8.dequantise(values, scale).flatten().tolist() == pytest.approx([largest] * 4, rel=1e-6)
    for broken in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            fp8.quantise(torch.tensor([[broken, 1.0]]))


SHAPE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mlp_only_layers": [0],
    "vocab_size": 300,
}


def test_only_projections_are_quantised() -> None:
    told = fp8.config(Architecture.of(SHAPE))
    assert told["weight_block_size"] == [128, 128]
    assert told["modules_to_not_convert"] == ["model.embed_tokens", "lm_head", "model.layers.1.mlp.gate"]


@pytest.mark.parametrize(
    ("degree", "changed", "where"),
    [
        (1, {}, None),
        (2, {}, None),
        (4, {}, "model.layers.0.self_attn.q_proj.weight"),  # one key-value head of 64 for each rank
        (2, {"moe_intermediate_size": 128}, "model.layers.1.mlp.experts.0.gate_proj.weight"),
        (1, {"moe_intermediate_size": 192}, "model.layers.1.mlp.experts.0.gate_proj.weight"),
        (1, {"head_dim": 48}, None),  # 4 heads of 48 are 192 rows of keys
    ],
)
def test_cuts_inside_of_a_block_are_found(degree: int, changed: dict[str, int], where: str | None) -> None:
    model = Architecture.of(SHAPE | changed)
    if changed.get("head_dim"):
        where = "model.layers.0.self_attn.q_proj.weight"
    assert fp8.unaligned(model, vllm_rows(model), degree) == where


def test_the_end_of_a_whole_projection_may_lie_inside_of_a_block() -> None:
    model = Architecture.of(SHAPE)
    row = copy("a.weight", "a.weight", 0, (200, 128), dim=0)
    assert fp8.unaligned(model, [row], 1) is None
    assert fp8.unaligned(model, [row], 2) == "a.weight"
    fused = Row(("a", "b"), ((200, 128), (100, 128)), "ab", 0, ((Segment(0, 0, 200),), (Segment(1, 0, 100),)))
    assert fp8.unaligned(model, [fused], 1) == "a"
