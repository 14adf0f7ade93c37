"""AdamW for machines with neither Transformer Engine nor apex, in the place of the one that megatron-core takes there.

megatron-core falls back on ``torch.optim.AdamW``, which counts its steps per parameter, and can then not load its own
resharded checkpoints. This class counts per parameter group, as the other two do, so that megatron-core treats all
three alike; and it uses torch's fused kernel, which takes a seventh of the time on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from spark_megatron.engine.platform import Patch


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019) where ``adam_w_mode``.

    Args:
        params: parameters or groups of them, fp32.
        adam_w_mode: False adds the decay to the gradient instead.
        capturable: newer releases of megatron-core say whether the update is part of a CUDA graph.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("FusedAdam cannot be captured in a CUDA graph: install Transformer Engine")
        self._update = adamw if adam_w_mode else adam
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("FusedAdam.step takes no closure")
        for group in self.param_groups:
            # The kernel wants a counter of its own per parameter, and increases it.
            past = group.get("step", 0)
            group["step"] = past + 1
            params = [p for p in group["params"] if p.grad is not None]
            states = [self._state(p) for p in params]
            self._update(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(float(past), device=p.device) for p in params],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


_LIKE_APEX = "FusedAdam counts its steps as apex's optimizer of that name does"

PATCHES = (
    Patch("megatron.core.optimizer:Adam", FusedAdam, "the class that the factory builds"),
    Patch("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", False, "or the factory builds torch's AdamW"),
    Patch("megatron.core.optimizer.distrib_optimizer:Adam", FusedAdam, "the class that it accepts"),
    Patch("megatron.core.optimizer.distrib_optimizer:USING_APEX_OPTIMIZER", True, _LIKE_APEX),
    Patch("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", True, _LIKE_APEX),
)


def install() -> None:
    """Give megatron-core this class, unless it found a better one. Safe to call again."""
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        for patch in PATCHES:
            patch.apply()
