"""Policy-gradient losses of single tokens, without any masking or averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from spark_megatron.algos.numerics import finite_exp


class TokenLoss(NamedTuple):
    """Per-token results, all of the shape of the inputs."""

    loss: torch.Tensor
    """To be minimised; differentiable in the log-probabilities."""
    ratio: torch.Tensor
    """Probability of the token now over that before the first update."""
    clipped: torch.Tensor
    """Bool: tokens that get no gradient because the ratio has left the trusted range."""


class PolicyLoss(Protocol):
    """``(logprobs, old_logprobs, advantage) -> TokenLoss``; all tensors have one shape."""

    def __call__(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantage: torch.Tensor, /) -> TokenLoss: ...


@dataclass(frozen=True, kw_only=True)
class PPOClip:
    """``-min(A ratio, A clip(ratio, 1 - clip_low, 1 + clip_high))`` (PPO, arXiv 1707.06347, Eq. 7, negated).

    Two bounds rather than one follow DAPO's "clip-higher" (arXiv 2503.14476); SPARK has 0.2 for both. Positions that
    are not trained may hold NaN: replace the inputs there before the call, as ``unified.token_loss`` does; replacing
    the result would leave NaN in the gradient.
    """

    clip_low: float
    clip_high: float

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"policy_loss.clip_low={self.clip_low} must lie in (0, 1], e.g. 0.2")
        if not self.clip_high > 0:
            raise ValueError(f"policy_loss.clip_high={self.clip_high} must be above 0, e.g. 0.2")

    def __call__(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantage: torch.Tensor) -> TokenLoss:
        ratio = finite_exp(logprobs - old_logprobs)
        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
        clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        return TokenLoss(loss, ratio, clipped)
