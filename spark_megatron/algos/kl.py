"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

With ``d = logp - ref_logp`` and the token sampled from the policy (the definitions and the statements about the value
are from J. Schulman, "Approximating KL Divergence", 2020; those about the gradient are ours and short enough to
check here, with ``grad`` acting on the estimator as a loss, that is with the sampled token held fixed):

====  ===================  =================  ==============================================================
name  token value          mean value         mean gradient as a loss
====  ===================  =================  ==============================================================
k1    d                    KL, unbiased       E[grad logp] = 0: no pull at all
k2    d^2 / 2              biased             E[d grad logp] = grad KL(policy || reference), unbiased
k3    exp(-d) - 1 + d      KL, unbiased       E[(1 - exp(-d)) grad logp] = grad KL(reference || policy)
====  ===================  =================  ==============================================================

k3 is never negative and varies less than k1, whose sign changes from token to token. Used in the reward instead of
the loss (a score-function gradient, ``E[k1 grad logp]``), it is k1 that is unbiased in the gradient. SPARK puts k3 in
the loss. Once the policy has moved away from the one that sampled, none of the statements is exact.
"""

from __future__ import annotations

from typing import Protocol

import torch

from spark_megatron.algos.numerics import finite_exp


class KLEstimator(Protocol):
    """``(logp, ref_logp) -> token values``, all of one shape; differentiable in ``logp``."""

    def __call__(self, logp: torch.Tensor, ref_logp: torch.Tensor, /) -> torch.Tensor: ...


def k1(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """The log-ratio itself: unbiased in value, without effect in a loss."""
    return logp - ref_logp


def k2(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: unbiased in gradient, biased in value (by terms of third order in d)."""
    return 0.5 * (logp - ref_logp).square()


def k3(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """``exp(-d) - 1 + d``: unbiased in value, with the gradient of the opposite KL; finite for any finite input.

    Where the reference finds a token more than e^20 times likelier than the policy does, the exponential continues
    as its tangent (see :func:`spark_megatron.algos.numerics.finite_exp`).
    """
    d = logp - ref_logp
    return finite_exp(-d) - 1 + d
