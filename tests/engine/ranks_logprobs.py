"""What two tensor-parallel ranks compute from slices of given logits. Needs torch only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spark_megatron.engine.logprobs import vocab_parallel_logprobs


def on_slices(full: Tensor, labels: Tensor, grad: Tensor, vocab_size: int, temperatures: list[float]) -> dict[Any, Any]:
    """Per temperature: log-probs, entropies, this rank's gradient, and whether the logits were left as they were."""
    group = dist.group.WORLD
    assert group is not None
    answers = {}
    for temperature in temperatures:
        columns = full.shape[-1] // group.size()
        logits = full[..., group.rank() * columns :][..., :columns].clone().requires_grad_()
        kept = logits.detach().clone()
        logprobs, entropy = vocab_parallel_logprobs(logits, labels, group, vocab_size, temperature)
        untouched = torch.equal(logits, kept)
        logprobs.backward(grad)
        answers[temperature] = {
            "logprobs": logprobs.detach(),
            "entropy": entropy.detach(),
            "grad": logits.grad,
            "entropy_has_grad": entropy.requires_grad,
            "untouched": untouched and torch.equal(logits, kept),
        }
    return answers
