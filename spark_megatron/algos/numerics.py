"""Functions that stay finite where the textbook form overflows."""

from __future__ import annotations

import math

import torch

EXP_LIMIT = 20.0
"""Largest argument that ``finite_exp`` exponentiates; e^20 = 4.9e8 leaves float32 room for sums and products."""


def finite_exp(x: torch.Tensor) -> torch.Tensor:
    """``exp(x)`` up to ``EXP_LIMIT`` and its tangent beyond (ours). Any shape, same shape back.

    A clamp would be finite too, but its gradient is zero, so that exactly the tokens that drifted furthest would no
    longer be pulled back. The tangent keeps the gradient (e^20) and the order of the values.
    """
    # relu rather than clamp(min=0): at x == EXP_LIMIT its derivative is 0, so the two parts never count twice.
    return torch.exp(x.clamp(max=EXP_LIMIT)) + math.exp(EXP_LIMIT) * torch.relu(x - EXP_LIMIT)
