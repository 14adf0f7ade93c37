"""From comparisons of texts to micro-batches of a reward model, whose weights make the loss of a step a plain sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spark_megatron.types import Comparison, Comparisons


@dataclass(frozen=True)
class TermWeights:
    """What one term of a step's loss weighs: a pair, and the label of one text."""

    pair: float
    label: float


def term_weights(comparisons: Sequence[Comparison], anchor: float) -> TermWeights:
    """The weights that make the loss of all ``comparisons`` of a step, over all ranks, the mean of its pairs plus
    ``anchor`` times the mean of its labels; either is 0 where there are none."""
    pairs = sum(1 for c in comparisons if c.right and c.wrong)
    labels = sum(bool(c.right) + bool(c.wrong) for c in comparisons)
    return TermWeights(1 / pairs if pairs else 0.0, anchor / labels if labels else 0.0)


def comparison_lengths(comparisons: Sequence[Comparison]) -> list[int]:
    """Tokens of each comparison, which is never cut into several micro-batches."""
    return [len(c.right) + len(c.wrong) for c in comparisons]


def pack_comparisons(comparisons: Sequence[Comparison], weights: TermWeights) -> Comparisons:
    """One micro-batch that holds ``comparisons`` one behind the other.

    A term that weighs nothing is left out. Without comparisons it is one sequence of two tokens that trains nothing, so
    that every rank has something to run. ValueError for a comparison without any text.
    """
    texts: list[tuple[int, ...]] = []
    terms: list[tuple[int, int, float]] = []
    for comparison in comparisons:
        if not comparison.right and not comparison.wrong:
            raise ValueError("a comparison of no texts: give a right one, a wrong one or both")
        right, wrong = _place(texts, comparison.right), _place(texts, comparison.wrong)
        if right >= 0 and wrong >= 0:
            terms.append((right, wrong, weights.pair))
        terms += [(better, worse, weights.label) for better, worse in ((right, -1), (-1, wrong)) if better != worse]
    terms = [term for term in terms if term[2]]
    texts = texts or [(0, 0)]
    return Comparisons(
        cu_seqlens=torch.tensor([0, *map(len, texts)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        tokens=torch.tensor([token for text in texts for token in text]),
        better=torch.tensor([better for better, _, _ in terms], dtype=torch.long),
        worse=torch.tensor([worse for _, worse, _ in terms], dtype=torch.long),
        weight=torch.tensor([weight for _, _, weight in terms]),
    )


def _place(texts: list[tuple[int, ...]], text: tuple[int, ...]) -> int:
    """Append a text and give its index; -1 for an empty one."""
    if not text:
        return -1
    texts.append(text)
    return len(texts) - 1
