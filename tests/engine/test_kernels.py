"""The layers' functions for CPUs: values and gradients against plain formulas and autograd, in fp32 and bf16.

Tolerances are shares of a result's largest element: fp32 sums in another order, bf16 rounds results to 8 bits
(on either side, once at the end).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spark_megatron.engine import kernels, platform
from tests import distributed

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.fixture(params=["fp32", "bf16", "bf16 in fp32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """bf16 on machines with and without instructions for it."""
    monkeypatch.setattr(platform, "has_fast_bf16", lambda: request.param == "bf16")
    return torch.float32 if request.param == "fp32" else torch.bfloat16


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    atol = NEAR[dtype] * float(expected.detach().abs().max())
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=atol)


def assert_same(function: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Values and gradients of ``function`` are those of ``formula`` in fp32."""
    dtype = inputs[0].dtype
    wide = [x.detach().float().requires_grad_() for x in inputs]
    found, expected = function(*inputs), formula(*wide)
    assert found.dtype == dtype
    assert_near(found, expected, dtype)
    (grad,) = tensors(dtype, tuple(found.shape))
    wanted = torch.autograd.grad(expected, wide, grad.float())
    for ours, theirs, x in zip(torch.autograd.grad(found, inputs, grad), wanted, inputs, strict=True):
        assert ours.dtype == x.dtype
        assert_near(ours, theirs, dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return kernels.linear(x, weight, bias, False, False, False, None)


def test_linear(dtype: torch.dtype) -> None:
    assert_same(linear, torch.nn.functional.linear, tensors(dtype, (33, 1, 24), (40, 24), (40,)))


def test_the_gradient_of_a_weight_adds_to_what_its_main_grad_holds(dtype: torch.dtype) -> None:
    """And is nowhere else. It is not rounded to bf16 where products are in fp32."""
    x, weight, grad = tensors(dtype, (33, 1, 24), (40, 24), (33, 1, 40))
    weight.main_grad = torch.ones(40, 24)  # type: ignore[attr-defined]
    for _ in range(2):
        linear(x, weight).backward(grad)
    expected = 1 + 2 * grad[:, 0].detach().float().T @ x[:, 0].detach().float()
    precision = torch.float32 if platform.product_dtype(x) == torch.float32 else dtype
    assert_near(weight.main_grad, expected, precision)  # type: ignore[attr-defined]
    assert weight.grad is None
    assert x.grad is not None


def test_a_frozen_weight_gets_no_gradient(dtype: torch.dtype) -> None:
    x, weight = tensors(dtype, (33, 1, 24), (40, 24))
    weight = weight.detach()
    weight.main_grad = torch.ones(40, 24)  # type: ignore[attr-defined]
    linear(x, weight).sum().backward()
    assert (weight.main_grad == 1).all()  # type: ignore[attr-defined]
    assert_near(x.grad, weight.float().sum(0).expand_as(x), dtype)


@pytest.mark.parametrize("shape", [(33, 1, 24), (33, 1, 4, 24)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of hidden states, and of the heads of queries and keys."""

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 0.3).sqrt() * weight

    assert_same(lambda x, weight: kernels.rms_norm(x, weight, 0.3), formula, tensors(dtype, shape, (24,)))


def test_swiglu(dtype: torch.dtype) -> None:
    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate * gate.sigmoid() * up

    assert_same(lambda x: kernels.swiglu(x, None, False, False), formula, tensors(dtype, (33, 1, 48)))
    x, weights = tensors(dtype, (33, 48), (33, 1))
    assert_same(lambda x, w: kernels.weighted_swiglu(x, None, w, False), lambda x, w: formula(x) * w, [x, weights])


def test_rotate(dtype: torch.dtype) -> None:
    """A pair (i, i + d / 2) of a head is a complex number, turned by its token's angle."""
    angles = torch.rand(33, 1, 12) * 6
    table = torch.stack([angles.cos(), angles.sin()])

    def formula(x: Tensor) -> Tensor:
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    assert_same(lambda x: kernels.rotate(x, table, config=None, cu_seqlens=None), formula, tensors(dtype, (33, 4, 24)))


def test_spread_and_collect(dtype: torch.dtype) -> None:
    """Five tokens over rectangles of 2 x 2 and 1 x 3 cells, two of them empty; and back."""
    cells = torch.tensor([4, 0, 3, 1, 6])

    def spread(x: Tensor) -> Tensor:
        first, second = kernels.spread(x, cells, [(2, 2), (1, 3)])
        assert first.shape == (2, 2, 7)
        assert second.shape == (1, 3, 7)
        return torch.cat([first.flatten(0, 1), second.flatten(0, 1)])

    place = torch.nn.functional.one_hot(cells, 7).float()
    assert_same(spread, lambda x: place.T @ x, tensors(dtype, (5, 7)))
    assert_same(lambda x: kernels.collect(x, cells), lambda x: place @ x, tensors(dtype, (7, 7)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return distributed.run(2, "tests.engine.ranks_kernels:on_slices", tmp_path_factory.mktemp("kernels") / "job")


@pytest.mark.parametrize("kind", ["allreduce", "sequence"])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_column_parallel_layer_on_two_ranks(name: str, kind: str, pair: list[dict[Any, Any]]) -> None:
    """Every rank has its columns of the result, its rows of the weight's gradient, and of that of the input, whose
    parts from both ranks are added up, all of it or its own half of the tokens."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    x, weight, grad = (t.detach() for t in tensors(dtype, (34, 1, 24), (40, 24), (34, 1, 40)))
    answers = [rank[name, kind] for rank in pair]
    assert_near(torch.cat([a["out"] for a in answers], -1), x.float() @ weight.float().T, dtype)
    assert_near(torch.cat([a["weight_grad"] for a in answers]), grad[:, 0].float().T @ x[:, 0].float(), dtype)
    expected = grad.float() @ weight.float()
    if kind == "sequence":
        assert_near(torch.cat([a["grad"] for a in answers]), expected, dtype)
    for answer in answers if kind == "allreduce" else []:
        assert_near(answer["grad"], expected, dtype)
