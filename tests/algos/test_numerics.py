import math

import pytest
import torch

from spark_megatron.algos.numerics import EXP_LIMIT, finite_exp


def test_is_the_exponential_up_to_the_limit() -> None:
    x = torch.tensor([-200.0, -1.0, 0.0, 1.0, EXP_LIMIT])
    assert torch.equal(finite_exp(x), x.exp())


def test_continues_as_the_tangent() -> None:
    x = torch.tensor(EXP_LIMIT + 3, requires_grad=True)
    y = finite_exp(x)
    (grad,) = torch.autograd.grad(y, x)
    assert y.item() == pytest.approx(4 * math.exp(EXP_LIMIT), rel=1e-6)
    assert grad.item() == pytest.approx(math.exp(EXP_LIMIT), rel=1e-6)


def test_derivative_is_counted_once_at_the_limit_itself() -> None:
    x = torch.tensor(EXP_LIMIT, requires_grad=True, dtype=torch.float64)
    (grad,) = torch.autograd.grad(finite_exp(x), x)
    assert grad.item() == pytest.approx(math.exp(EXP_LIMIT), rel=1e-12)
