"""The optimizer of machines without Transformer Engine and apex."""

import copy
import importlib
from typing import Any

import pytest
import torch

from spark_megatron.engine.adam import PATCHES, FusedAdam
from spark_megatron.engine.platform import Patch

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters() -> list[torch.Tensor]:
    """Two that are trained (longer than a vector register, and not a multiple of one), and one without a gradient."""
    torch.manual_seed(1)
    return [torch.randn(shape, requires_grad=True) for shape in ((37, 3), (1,), (5,))]


def train(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], updates: int) -> None:
    for update in range(updates):
        generator = torch.Generator().manual_seed(update)
        for parameter in params[:2]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_it_updates_as_torch_does(decoupled: bool) -> None:
    """1e-6: the fused kernel multiplies where the other divides."""
    ours, theirs = parameters(), parameters()
    train(FusedAdam(ours, **SETTINGS, adam_w_mode=decoupled), ours, updates=5)
    train((torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **SETTINGS), theirs, updates=5)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[2], parameters()[2])


def test_it_counts_per_group_and_goes_on_after_a_load() -> None:
    ours, again = parameters(), parameters()
    first = FusedAdam([{"params": ours[:1]}, {"params": ours[1:]}], **SETTINGS)
    train(first, ours, updates=3)
    assert [group["step"] for group in first.param_groups] == [3, 3]
    assert {key for state in first.state.values() for key in state} == {"exp_avg", "exp_avg_sq"}
    second = FusedAdam([{"params": again[:1]}, {"params": again[1:]}], **SETTINGS)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for one, other in zip(ours, again, strict=True):
        other.data.copy_(one.data)
    train(first, ours, updates=2)
    train(second, again, updates=2)
    assert all(map(torch.equal, ours, again))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no closure"):
        FusedAdam(parameters(), **SETTINGS).step(lambda: 1.0)
    with pytest.raises(ValueError, match="CUDA graph"):
        FusedAdam(parameters(), **SETTINGS, capturable=True)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_target_exists(patch: Patch) -> None:
    module, _, attribute = patch.target.partition(":")
    assert hasattr(importlib.import_module(module), attribute)
