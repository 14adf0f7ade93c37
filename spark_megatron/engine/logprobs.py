"""Log-probabilities and entropies of labels from hidden states, in pieces, without ever holding all logits.

The vocabulary is split over the tensor-parallel ranks and never gathered. Logits exist for one piece of the tokens at a
time, in one buffer, so that the memory for them does not grow with the number of tokens. The backward pass finds those
of the last piece there; it computes the others again, which costs one more product with the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spark_megatron.engine.kernels import accumulate
from spark_megatron.engine.platform import product_dtype

BLOCK_BYTES = 1 << 20
"""Logits on which a CPU does one elementwise operation after the other: as many as stay in its cache meanwhile."""


class _LinearLogProbs(torch.autograd.Function):
    """(log p(label), entropy) of softmax(hidden @ weight.T / temperature); gradients flow through both.

    The gradient of a weight with a ``main_grad`` goes straight there, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        first: int,
        real: int,
        group: dist.ProcessGroup,
        temperature: float,
        piece: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # Per token and relative to this rank's largest logit: that logit, the label's, sum of exp(x), sum of x exp(x).
        parts = hidden.new_empty(4, len(labels), dtype=torch.float32)
        wide, head = _operands(hidden, weight[:real])
        buffer = wide.new_empty(min(piece, len(labels)), real)
        for start in range(0, len(labels), piece):
            tokens = wide[start : start + piece]
            logits = torch.mm(tokens, head.T, out=buffer[: len(tokens)])
            for rows in _blocks(logits):
                span = slice(start + rows.start, start + rows.stop)
                tempered = _tempered(logits[rows], hidden.dtype, temperature)
                parts[:, span] = _partial_sums(tempered, labels[span] - first)
        top, chosen, total, weighted = parts
        highest = top.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        # A rank that holds nothing but padding has -inf here, and all its sums are 0.
        shift = torch.where(top.isfinite(), top - highest, 0.0)
        scale = shift.exp()
        held = (labels >= first) & (labels < first + real)
        sums = torch.stack([torch.where(held, chosen + shift, 0.0), total * scale, scale * (weighted + shift * total)])
        dist.all_reduce(sums, group=group)
        chosen, total, weighted = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, labels - first, highest + log_total, entropy)
        ctx.real, ctx.temperature, ctx.piece = real, temperature, piece
        ctx.buffer = buffer if any(ctx.needs_input_grad) else None
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, log_norm, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_norm) if grad is None else grad / ctx.temperature
        entropy_grad = None if entropy_grad is None else entropy_grad / ctx.temperature
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            direct = hasattr(weight, "main_grad")
            grad_weight = weight.main_grad if direct else torch.zeros_like(weight, dtype=torch.float32)
        held = (local >= 0) & (local < ctx.real)
        column, label_grad = local.clamp(0, max(0, ctx.real - 1))[:, None], torch.where(held, grad, 0.0)[:, None]
        wide, head = _operands(hidden, weight[: ctx.real])
        buffer, ctx.buffer = ctx.buffer, None
        *others, last = range(0, len(local), ctx.piece)
        for start in (last, *others):
            tokens = wide[start : start + ctx.piece]
            logits = buffer[: len(tokens)]
            if start != last:
                torch.mm(tokens, head.T, out=logits)
            for rows in _blocks(logits):
                span = slice(start + rows.start, start + rows.stop)
                logp = _tempered(logits[rows], hidden.dtype, ctx.temperature).sub_(log_norm[span, None])
                factor = grad[span, None]
                if entropy_grad is not None:
                    # d entropy / d logit_j = -p_j (log p_j + entropy)
                    factor = factor + (logp + entropy[span, None]).mul_(entropy_grad[span, None])
                slope = logp.exp_().mul_(-factor)
                logits[rows] = slope.scatter_add_(1, column[span], label_grad[span]) if ctx.real else slope
            if grad_hidden is not None:
                grad_hidden[start : start + ctx.piece] = logits @ head
            if grad_weight is not None:
                accumulate(grad_weight[: ctx.real], logits.T, tokens)
        if grad_weight is not None:
            grad_weight = None if direct else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 6


def _operands(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.to(product_dtype(hidden)), head.to(product_dtype(head))


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = len(logits) if logits.is_cuda else max(1, BLOCK_BYTES // (4 * max(1, logits.shape[1])))
    for start in range(0, len(logits), size):
        yield slice(start, min(start + size, len(logits)))


def _tempered(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """fp32, rounded to ``dtype`` before the division, as the sampler does it. That is in fp32: 8 bits would cost 0.05
    nats. A tensor of its own."""
    return logits.to(dtype).float() / temperature


def _partial_sums(logits: Tensor, local: Tensor) -> Tensor:
    """[4, tokens]: the largest logit, the label's logit less that, and the sums of exp(x) and x exp(x), x less that."""
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
    real = min(len(weight), max(0, vocab_size - first))
    piece = max(1, logits_bytes // (4 * max(1, real)))
    logprobs, entropy = _LinearLogProbs.apply(hidden, weight, labels, first, real, group, temperature, piece)
    return logprobs, entropy
