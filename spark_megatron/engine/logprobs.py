"""Log-probabilities and entropies of labels from hidden states, in pieces, without ever holding all logits.

The vocabulary is split over the tensor-parallel ranks and never gathered. Logits exist for one piece of the tokens at a
time, in the forward pass and, recomputed, in the backward pass, so that the memory for them does not grow with the
number of tokens. The recomputation costs one more product with the head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spark_megatron.engine.platform import matmul


class _LinearLogProbs(torch.autograd.Function):
    """(log p(label), entropy) of softmax(hidden @ weight.T / temperature); gradients flow through both."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        first: int,
        group: dist.ProcessGroup,
        temperature: float,
        piece: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # Per token, relative to this rank's largest logit: that logit, log-weight of the label, sum of exp, sum of exp * x.
        parts = hidden.new_empty(4, len(labels), dtype=torch.float32)
        for start in range(0, len(labels), piece):
            span = slice(start, start + piece)
            parts[:, span] = _partial_sums(_logits(hidden[span], weight, temperature), labels[span] - first)
        top, chosen, total, weighted = parts
        highest = top.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        # A rank that holds nothing but padding has -inf here, and all its sums are 0.
        shift = torch.where(top.isfinite(), top - highest, 0.0)
        scale = shift.exp()
        held = (labels >= first) & (labels < first + len(weight))
        sums = torch.stack(
            [torch.where(held, chosen + shift, 0.0), total * scale, scale * (weighted + shift * total)]
        )
        dist.all_reduce(sums, group=group)
        chosen, total, weighted = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, labels, highest + log_total, entropy)
        ctx.first, ctx.temperature, ctx.piece = first, temperature, piece
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_norm, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(labels), ctx.piece):
            span = slice(start, start + ctx.piece)
            logp = _logits(hidden[span], weight, ctx.temperature).sub_(log_norm[span, None])
            probs = logp.exp()
            slope = torch.zeros_like(probs)
            if grad is not None:
                slope.addcmul_(probs, -grad[span, None])
                local = labels[span, None] - ctx.first
                held = (local >= 0) & (local < len(weight))
                if len(weight):
                    slope.scatter_add_(1, local.clamp(0, len(weight) - 1), torch.where(held, grad[span, None], 0.0))
            if entropy_grad is not None:
                # d entropy / d logit_j = -p_j (log p_j + entropy)
                slope.addcmul_(probs.mul_(logp.add_(entropy[span, None])), -entropy_grad[span, None])
            slope = slope.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[span] = matmul(slope, weight)
            if grad_weight is not None:
                grad_weight += matmul(slope.T, hidden[span])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 5


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[tokens, columns] in fp32. The division is in fp32 too, as the sampler does it: 8 bits would cost 0.05 nats."""
    return matmul(hidden, weight.T).float().div_(temperature)


def _partial_sums(logits: Tensor, local: Tensor) -> Tensor:
    """[4, tokens]: largest logit, the label's logit less that, and the sums of exp(x) and x exp(x) over x = the rest."""
    tokens, columns = logits.shape
    if not columns:
        return torch.stack([torch.full((tokens,), float("-inf")), *torch.zeros(3, tokens)]).to(logits.device)
    top = logits.amax(1)
    logits.sub_(top[:, None])
    chosen = logits.gather(1, local.clamp(0, columns - 1)[:, None])[:, 0]
    exps = logits.exp()
    return torch.stack([top, chosen, exps.sum(1), logits.mul_(exps).sum(1)])


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float,
    logits_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``labels`` and entropies (nats) under softmax(hidden @ head.T / temperature).

    Args:
        hidden: [tokens, hidden size], the same on every tensor-parallel rank. The gradient that arrives at it is that
            of this rank's slice of the vocabulary: it has to be summed over ``group``.
        weight: [columns, hidden size], this rank's rows of the (padded) head.
        labels: [tokens], ids of the whole vocabulary.
        vocab_size: true vocabulary size; padded rows beyond it get no probability and no gradient.
        logits_bytes: how much memory the fp32 logits of one piece may take (at least one token is computed at a time).

    Returns:
        (log-probs, entropies), each [tokens], fp32, equal on every rank of ``group``.
    """
    first = group.rank() * len(weight)
    real = max(0, vocab_size - first)
    if real < len(weight):  # a slice costs a copy of the gradient
        weight = weight[:real]
    piece = max(1, logits_bytes // (4 * max(1, len(weight))))
    logprobs, entropy = _LinearLogProbs.apply(hidden, weight, labels, first, group, temperature, piece)
    return logprobs, entropy
