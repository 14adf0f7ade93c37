"""What the layers compute on a CPU, without the waste of megatron-core's general code.

Most CPUs have no instructions for bf16: every product is some ten times faster in fp32 there, and every elementwise
operation converts to and fro. These functions take bf16, compute in fp32 and round once. Their backward passes are
written out, for autograd would hold every intermediate result and pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from spark_megatron.engine.platform import Patch, apply, matmul, product_dtype


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, with ``total`` in fp32."""
    if product_dtype(b) == total.dtype:
        total.addmm_(a.float(), b.float())
    else:
        total.add_(a @ b)


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``; the gradient of a weight with a ``main_grad`` goes straight there, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = matmul(x, weight.T)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grad_weight = grad.flatten(0, -2), None
        if ctx.needs_input_grad[1]:
            columns = x.flatten(0, -2)
            if hasattr(weight, "main_grad"):
                accumulate(weight.main_grad, rows.T, columns)
            else:
                grad_weight = matmul(rows.T, columns)
        grad_x = matmul(rows, weight).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **_unused: Any,
) -> Tensor:
    """In place of megatron-core's linear layers, trained or frozen, and of the collectives that are part of them.

    Args:
        input: [tokens (/ tp with ``sequence_parallel``), 1, columns].
        weight: [rows, columns], this rank's part.

    Returns:
        [tokens, 1, rows]
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    out: Tensor = _Linear.apply(input, weight, bias)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, wide = x * scale, weight.float()
        product = normed * grad
        along = (product @ wide).div_(x.shape[-1])[..., None]
        grad_x = (grad * wide).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang & Sennrich 2019)."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        gated = torch.nn.functional.silu(gate)
        ctx.save_for_backward(x, gated)
        return gated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gated = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        both = torch.empty_like(x)
        grad_gate, grad_up = both.chunk(2, -1)
        torch.mul(grad, gated, out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return both


def swiglu(x: Tensor, bias: None = None, *_unused: Any) -> Tensor:
    """``silu(first half) * second half`` of the last dimension (Shazeer 2020)."""
    assert bias is None, "gated layers of the supported models have no bias"
    out: Tensor = _SwiGLU.apply(x)
    return out


def weighted_swiglu(x: Tensor, bias: None, weights: Tensor, *_unused: Any) -> Tensor:
    """The same, times ``weights`` [tokens, 1] of an expert."""
    return (swiglu(x, bias) * weights).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    out = torch.empty_like(x, dtype=torch.float32)
    left, right = out.chunk(2, -1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return out.to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def rotate(t: Tensor, freqs: Tensor, **_unused: Any) -> Tensor:
    """In place of ``apply_rotary_pos_emb`` (Su et al. 2021; halves, not pairs, turn together).

    Args:
        t: queries or keys, [tokens, heads, d].
        freqs: cosines and sines, [2, tokens, 1, d / 2] in fp32, as ``modules.PackedRotary`` makes them.
    """
    out: Tensor = _Rotate.apply(t, *freqs)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(cells)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, cells, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(cells)
        ctx.shape = x.shape
        return x.index_select(0, cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (cells,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, cells, grad), None


def spread(x: Tensor, cells: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Put row i of ``x`` in cell ``cells[i]``, no two in one, and zeros in the others; cut into ``shapes`` (rows,
    length)."""
    sizes = [rows * length for rows, length in shapes]
    laid: Tensor = _Spread.apply(x, cells, sum(sizes))
    return [part.unflatten(0, shape) for part, shape in zip(laid.split(sizes), shapes, strict=True)]


def collect(x: Tensor, cells: Tensor) -> Tensor:
    """The way back: row ``cells[i]`` of ``x`` [cells, ...] becomes row i."""
    out: Tensor = _Collect.apply(x, cells)
    return out


_LAYERS = "megatron.core.tensor_parallel.layers"

PATCHES = (
    Patch(f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce", linear, "multiplies in bf16; adds up in it"),
    Patch(f"{_LAYERS}:linear_with_frozen_weight", linear, "multiplies in bf16"),
    Patch("megatron.core.transformer.mlp:bias_swiglu_impl", swiglu, "compiles its kernel"),
    Patch("megatron.core.transformer.mlp:weighted_bias_swiglu_impl", weighted_swiglu, "compiles its kernel"),
    Patch("megatron.core.transformer.attention:apply_rotary_pos_emb", rotate, "makes cosines and sines in each layer"),
)


def install() -> None:
    """Give megatron-core these functions on a machine without CUDA. Safe to call again."""
    if not torch.cuda.is_available():
        apply(PATCHES)
