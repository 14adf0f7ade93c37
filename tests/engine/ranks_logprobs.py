"""What tensor-parallel ranks compute from hidden states and their slices of a head. Needs torch only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spark_megatron.engine.logprobs import linear_logprobs


def on_slices(cases: dict[str, dict[str, Any]], temperatures: list[float], pieces: list[int]) -> dict[Any, Any]:
    """{(case, degree, temperature, bytes of a piece): this rank's answer} for all degrees that fit the job."""
    answers = {}
    world = dist.get_world_size()
    for degree in (d for d in (1, 2, 4) if d <= world):
        groups = [dist.new_group(list(range(first, first + degree))) for first in range(0, world, degree)]
        group = groups[dist.get_rank() // degree]
        for name, case in cases.items():
            for temperature in temperatures:
                for piece in pieces:
                    answers[name, degree, temperature, piece] = one(group, temperature, piece, **case)
    return answers


def one(
    group: dist.ProcessGroup,
    temperature: float,
    piece: int,
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    grad: Tensor,
    entropy_grad: Tensor,
) -> dict[str, Tensor]:
    """Values and gradients; the head gets rows of padding that would win every softmax."""
    rows = -(-len(head) // group.size())
    padded = torch.full((rows * group.size(), head.shape[1]), 100.0, dtype=head.dtype)
    padded[: len(head)] = head
    weight = padded[group.rank() * rows :][:rows].clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    before = hidden.detach().clone(), weight.detach().clone()
    logprobs, entropy = linear_logprobs(
        hidden,
        weight,
        labels,
        group=group,
        vocab_size=len(head),
        temperature=temperature,
        logits_bytes=piece,
    )
    torch.autograd.backward([logprobs, entropy], [grad, entropy_grad])
    assert hidden.grad is not None
    assert weight.grad is not None
    # What the model's own operator does in front of this function.
    total = hidden.grad.clone()
    dist.all_reduce(total, group=group)
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden_grad": total,
        "weight_grad": weight.grad,
        "untouched": torch.tensor(torch.equal(hidden, before[0]) and torch.equal(weight, before[1])),
    }
