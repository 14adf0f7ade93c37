"""Log-probabilities and entropies from logits that are split over the vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelLogProbs(torch.autograd.Function):
    """log p(label) and the entropy of each position; the gradient flows through log p only."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, temperature: float
    ) -> tuple[Tensor, Tensor]:
        columns = logits.shape[-1]
        local = labels - group.rank() * columns
        here = (local >= 0) & (local < columns)
        index = local.clamp(0, columns - 1).unsqueeze(-1)

        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        # The one copy of the logits: fp32 input must not be overwritten, since the graph may still need it. bf16 input
        # is subtracted and divided in fp32, as the sampler does it: at 8 bits both would move log-probs by some 0.05.
        shifted = (logits - top.unsqueeze(-1).float()).div_(temperature)
        chosen = torch.where(here, shifted.gather(-1, index).squeeze(-1), 0.0)
        exps = shifted.exp()
        # Padded columns hold -inf: exp is 0 there, but 0 * -inf would be NaN.
        weighted = torch.where(exps > 0, exps * shifted, 0.0).sum(-1)
        sums = torch.stack([chosen, exps.sum(-1), weighted])
        dist.all_reduce(sums, group=group)
        chosen, total, weighted = sums.unbind(0)
        probs = exps.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probs, here, index)
        ctx.dtype, ctx.temperature = logits.dtype, temperature
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy_grad: Tensor) -> tuple[Tensor, None, None, None]:
        probs, here, index = ctx.saved_tensors
        grad_logits = probs.mul(-grad.unsqueeze(-1))
        grad_logits.scatter_add_(-1, index, (grad * here).unsqueeze(-1))
        return grad_logits.div_(ctx.temperature).to(ctx.dtype), None, None, None


def vocab_parallel_logprobs(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``labels`` and entropies under softmax(logits / temperature).

    Args:
        logits: [..., V / tp], this tensor-parallel rank's slice of the (padded) vocabulary.
        labels: [...], token ids of the whole vocabulary.
        vocab_size: true vocabulary size; padded columns beyond it get probability 0.

    Returns:
        (log-probs, entropies), each [...], fp32, equal on every rank of ``group``. Entropy carries no gradient.
    """
    start = group.rank() * logits.shape[-1]
    padded = start + logits.shape[-1] - vocab_size
    if padded > 0:
        columns = torch.arange(start, start + logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(columns >= vocab_size, float("-inf"))
    logprobs, entropy = _VocabParallelLogProbs.apply(logits, labels, group, temperature)
    return logprobs, entropy
