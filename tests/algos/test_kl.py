"""The statements about the estimators, as exact expectations over a five-way softmax."""

import math
from collections.abc import Callable

import pytest
import torch

from spark_megatron.algos.kl import KLEstimator, k1, k2, k3

LOGITS = torch.tensor([0.3, -1.2, 0.8, 2.0, -0.5], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.2, -0.7, 0.4, 0.1], dtype=torch.float64).log_softmax(0)
ESTIMATORS = [k1, k2, k3]


def reverse_kl(logp: torch.Tensor) -> torch.Tensor:
    return (logp.exp() * (logp - REFERENCE)).sum()


def forward_kl(logp: torch.Tensor) -> torch.Tensor:
    return (REFERENCE.exp() * (REFERENCE - logp)).sum()


def gradient(of: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor = LOGITS) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(of(leaf.log_softmax(0)), leaf)
    return grad


def mean_as_loss(estimator: KLEstimator) -> Callable[[torch.Tensor], torch.Tensor]:
    """E[estimator] whose gradient does not see that the policy chooses the token."""
    return lambda logp: (logp.detach().exp() * estimator(logp, REFERENCE)).sum()


def test_token_values() -> None:
    logp, ref = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-2.0, -1.0], dtype=torch.float64)
    assert k1(logp, ref).tolist() == [1.0, -1.0]
    assert k2(logp, ref).tolist() == [0.5, 0.5]
    assert k3(logp, ref).tolist() == pytest.approx([1 / math.e, math.e - 2])


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased_in_value(estimator: KLEstimator) -> None:
    logp = LOGITS.log_softmax(0)
    assert mean_as_loss(estimator)(logp).item() == pytest.approx(reverse_kl(logp).item(), rel=1e-12)


def test_k2_is_biased_in_value() -> None:
    # Policy (0.9, 0.1) and reference (0.5, 0.5).
    policy, d = torch.tensor([0.9, 0.1]), torch.tensor([1.8, 0.2]).log()
    assert (policy * k1(d, torch.zeros(2))).sum().item() == pytest.approx(0.36806, abs=1e-5)
    assert (policy * k2(d, torch.zeros(2))).sum().item() == pytest.approx(0.28498, abs=1e-5)


def test_k2_as_loss_has_the_reverse_gradient() -> None:
    torch.testing.assert_close(gradient(mean_as_loss(k2)), gradient(reverse_kl))


def test_k1_as_loss_has_no_gradient() -> None:
    torch.testing.assert_close(gradient(mean_as_loss(k1)), torch.zeros_like(LOGITS), atol=1e-12, rtol=0)


def test_k3_as_loss_has_the_forward_gradient() -> None:
    torch.testing.assert_close(gradient(mean_as_loss(k3)), gradient(forward_kl))
    assert not torch.allclose(gradient(forward_kl), gradient(reverse_kl), atol=0.1)


def test_k1_in_the_reward_has_the_reverse_gradient() -> None:
    def score_function(logp: torch.Tensor) -> torch.Tensor:
        return (logp.detach().exp() * k1(logp, REFERENCE).detach() * logp).sum()

    torch.testing.assert_close(gradient(score_function), gradient(reverse_kl))


def test_k3_is_never_negative_and_zero_only_at_equality() -> None:
    d = torch.linspace(-30, 30, 601, dtype=torch.float64)
    values = k3(d, torch.zeros_like(d))
    assert (values >= 0).all()
    assert values.argmin() == 300


@pytest.mark.parametrize("estimator", [k2, k3])
def test_descending_the_loss_approaches_the_reference(estimator: KLEstimator) -> None:
    stepped = LOGITS - 0.1 * gradient(mean_as_loss(estimator))
    assert reverse_kl(stepped.log_softmax(0)) < reverse_kl(LOGITS.log_softmax(0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_token_far_from_the_reference_stays_finite_and_is_pulled(estimator: KLEstimator) -> None:
    logp = torch.tensor(-100.0, requires_grad=True)
    value = estimator(logp, torch.tensor(-0.1))
    (grad,) = torch.autograd.grad(value, logp)
    assert value.isfinite()
    assert grad.isfinite()
    assert grad != 0
