"""Weights in blocks of 8-bit floats for a sampler whose trainer computes in more.

A block of 128 x 128 weights shares one fp32 scale, ``amax / 448``: the form of DeepSeek-V3's checkpoints (arXiv
2412.19437, section 3.3), which vLLM loads as ``weight`` and ``weight_scale_inv``. Each rank quantises its own shard, so
that cuts between ranks and between fused parts must fall between blocks (:func:`unaligned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from spark_megatron.architecture import Architecture
from spark_megatron.slices import Row

BLOCK = 128
LARGEST = 448.0
"""The largest finite value of ``torch.float8_e4m3fn``."""

CPU_FLAG = "amx_tile"
"""What a CPU needs for vLLM's kernels of such weights, as /proc/cpuinfo names it."""


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values float8_e4m3fn [..., N, K], scales fp32 [..., N / 128, K / 128] rounded up) of weights [..., N, K].

    ``values * scale`` of the block is the weight, rounded to three bits of mantissa. A block of zeros has the scale 1.
    ValueError for a weight that is not finite.
    """
    rows, columns = weight.shape[-2:]
    padded = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    amax = blocks.abs().amax((-3, -1), keepdim=True)
    if not amax.isfinite().all():
        raise ValueError("weights that are not finite cannot be quantised")
    scale = torch.where(amax > 0, amax / LARGEST, torch.ones_like(amax))
    # Rounding can lift the largest value of a block just above the format's range, which would become NaN.
    values = (blocks / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    values = values.flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    return values.contiguous(), scale.squeeze(-1).squeeze(-2)


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """fp32 weights [..., N, K] from :func:`quantise`'s result."""
    rows, columns = values.shape[-2:]
    wide = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return values.float() * wide[..., :rows, :columns]


def config(model: Architecture) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint whose projections are quantised, and nothing else."""
    ignored = ["model.embed_tokens", "lm_head"]
    ignored += [f"model.layers.{layer}.mlp.gate" for layer, sparse in enumerate(model.sparse) if sparse]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ignored,
    }


def unaligned(model: Architecture, rows: Sequence[Row], degree: int) -> str | None:
    """A projection that ``degree`` ranks cut, or that is fused, inside of a block; None if there is none.

    The last part of a fused projection, and the input of an uncut one, may end inside of a block.
    """
    for row in rows:
        if len(row.shapes[0]) != 2 or row.hf[0].endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            continue
        for rank in range(degree):
            parts = list(row.segments(degree, rank))
            inner = parts if degree > 1 else parts[:-1]
            if any(len(segment) % BLOCK for _, segment in inner):
                return row.hf[0]
    return None


def missing(on_gpu: bool) -> str | None:
    """Why this machine's vLLM has no kernel for such weights; None if it has, as far as can be told without it."""
    if on_gpu:
        return None  # vLLM chooses by the GPU's generation when it starts
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next((line for line in file if line.startswith("flags")), "").split()
    return None if CPU_FLAG in flags else f"vLLM's CPU kernels for FP8 blocks need {CPU_FLAG}, which this CPU lacks"
