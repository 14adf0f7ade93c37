import math
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from spark_megatron.algos.policy_loss import PPOClip

CONF = Path(__file__).parents[2] / "conf" / "policy_loss"


def evaluate(ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> list[float]:
    """Loss, its derivative with respect to the log-probability, and 1 if the token is clipped."""
    logp = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    loss = PPOClip(clip_low=low, clip_high=high)
    result = loss(logp, torch.zeros_like(logp), torch.tensor(advantage, dtype=torch.float64))
    (grad,) = torch.autograd.grad(result.loss, logp)
    assert result.ratio.item() == pytest.approx(ratio)
    return [result.loss.item(), grad.item(), float(result.clipped)]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.0, -2.0, 2.0, 2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.4, 0.0, 1),
        (1.5, -2.0, 3.0, 3.0, 0),
        (0.5, 2.0, -1.0, -1.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_worked_values(ratio: float, advantage: float, loss: float, grad: float, clipped: int) -> None:
    assert evaluate(ratio, advantage) == pytest.approx([loss, grad, clipped])


def test_the_two_bounds_are_separate() -> None:
    assert evaluate(1.25, 1.0, high=0.28) == pytest.approx([-1.25, -1.25, 0])
    assert evaluate(1.25, 1.0, high=0.2) == pytest.approx([-1.2, 0, 1])
    assert evaluate(0.75, -1.0, low=0.3) == pytest.approx([0.75, 0.75, 0])
    assert evaluate(0.75, -1.0, low=0.2) == pytest.approx([0.8, 0, 1])


def test_shapes_are_kept() -> None:
    result = PPOClip(clip_low=0.2, clip_high=0.2)(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3))
    assert result.loss.shape == result.ratio.shape == result.clipped.shape == (2, 3)
    assert result.clipped.dtype == torch.bool


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_an_enormous_ratio_stays_finite(advantage: float) -> None:
    logp = torch.tensor(0.0, requires_grad=True)
    loss = PPOClip(clip_low=0.2, clip_high=0.2)(logp, torch.tensor(-100.0), torch.tensor(advantage)).loss
    (grad,) = torch.autograd.grad(loss, logp)
    assert loss.isfinite()
    assert grad.isfinite()
    # Only the token that is punished for having become likelier is still pulled.
    assert bool(grad != 0) == (advantage < 0)


@pytest.mark.parametrize("low", [0.0, 1.5, math.nan])
def test_clip_low_is_checked(low: float) -> None:
    with pytest.raises(ValueError, match=r"policy_loss\.clip_low"):
        PPOClip(clip_low=low, clip_high=0.2)


@pytest.mark.parametrize("high", [0.0, -0.1, math.nan])
def test_clip_high_is_checked(high: float) -> None:
    with pytest.raises(ValueError, match=r"policy_loss\.clip_high"):
        PPOClip(clip_low=0.2, clip_high=high)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configured_loss_is_a_policy_gradient_at_ratio_one(path: Path) -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = instantiate(OmegaConf.load(path))(logp, logp.detach(), torch.tensor([3.0, -0.5])).loss
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    assert grad.tolist() == [-3.0, 0.5]
