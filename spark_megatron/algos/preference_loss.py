"""The loss of a reward model: which of two texts is better, and whether one is right.

Both are ``-log sigmoid(margin)``: of a pair (Bradley and Terry 1952) the margin is the difference of the two scores, of
a label (binary cross-entropy on sigmoid(score)) it is the score of a right text, or that of a wrong one with the sign
turned. A label is therefore a comparison with a score of 0.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from spark_megatron.types import Comparisons

Stats = dict[str, torch.Tensor]
"""Detached float64 scalars that combine by addition."""


def margins(scores: torch.Tensor, better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """[terms]: by how much the better sequence of each term leads; index -1 stands for a score of 0.

    Args:
        scores: [sequences], logits.
        better, worse: [terms], indices of sequences, or -1.
    """
    with_zero = torch.cat([scores, scores.new_zeros(1)])
    return with_zero[better] - with_zero[worse]


def comparison_loss(scores: torch.Tensor, batch: Comparisons) -> tuple[torch.Tensor, Stats]:
    """Loss (scalar) and summed statistics of one micro-batch.

    ``loss = sum_k weight_k * -log sigmoid(margin_k)``; without terms a zero that is still part of the graph.

    Statistics: "loss" (already weighted: add, do not divide); of pairs and of labels their number ("pairs", "labels"),
    the number whose margin is positive ("..._right") and the sum of the unweighted losses ("..._loss").
    """
    if batch.better.shape != batch.weight.shape or batch.worse.shape != batch.weight.shape:
        shapes = [tuple(x.shape) for x in (batch.better, batch.worse, batch.weight)]
        raise ValueError(f"better, worse and weight have the shapes {shapes}: they are one entry per term")
    margin = margins(scores, batch.better, batch.worse)
    terms = softplus(-margin)
    loss = (batch.weight * terms).sum()
    pair = (batch.better >= 0) & (batch.worse >= 0)
    stats = {"loss": loss.detach().double()}
    for name, mask in (("pair", pair), ("label", ~pair)):
        stats |= {
            f"{name}s": mask.sum().double(),
            f"{name}_right": (mask & (margin > 0)).sum().double(),
            f"{name}_loss": torch.where(mask, terms.detach(), 0.0).sum(dtype=torch.float64),
        }
    return loss, stats
