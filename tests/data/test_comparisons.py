"""Comparisons in micro-batches: what is where, and weights that add up to the means of the step."""

import pytest
import torch

from spark_megatron.algos.preference_loss import comparison_loss
from spark_megatron.data.comparisons import TermWeights, comparison_lengths, pack_comparisons, term_weights
from spark_megatron.types import Comparison

STEP = [Comparison((5, 6, 7), (8, 9)), Comparison((4,), ()), Comparison((), (3, 3)), Comparison((1,), (2,))]


def test_a_micro_batch_by_hand() -> None:
    """Two pairs count half each; six labels at an anchor of 0.3 count 0.05 each."""
    weights = term_weights(STEP, anchor=0.3)
    assert weights == TermWeights(pair=0.5, label=pytest.approx(0.05))
    batch = pack_comparisons(STEP, weights)
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 8, 9, 10]
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 4, 3, 3, 1, 2]
    terms = list(zip(batch.better.tolist(), batch.worse.tolist(), strict=True))
    assert terms == [(0, 1), (0, -1), (-1, 1), (2, -1), (-1, 3), (4, 5), (4, -1), (-1, 5)]
    assert batch.weight.tolist() == pytest.approx([0.5, 0.05, 0.05, 0.05, 0.05, 0.5, 0.05, 0.05])
    assert comparison_lengths(STEP) == [5, 1, 2, 2]


def test_without_an_anchor_there_are_pairs_only() -> None:
    batch = pack_comparisons(STEP, term_weights(STEP, anchor=0.0))
    assert list(zip(batch.better.tolist(), batch.worse.tolist(), strict=True)) == [(0, 1), (4, 5)]


def test_any_cut_gives_the_loss_of_the_step() -> None:
    weights = term_weights(STEP, anchor=0.3)
    whole = pack_comparisons(STEP, weights)
    scores = torch.tensor([0.3, -0.2, 1.5, 0.7, -0.4, 0.1])
    expected = float(comparison_loss(scores, whole)[0])
    parts = [(STEP[:2], scores[:3]), (STEP[2:], scores[3:])]
    assert sum(float(comparison_loss(s, pack_comparisons(c, weights))[0]) for c, s in parts) == pytest.approx(expected)


def test_nothing_to_compare_is_a_batch_that_trains_nothing() -> None:
    batch = pack_comparisons([], term_weights([], anchor=1.0))
    assert (batch.cu_seqlens.tolist(), len(batch.weight)) == ([0, 2], 0)
    empty = pack_comparisons(STEP, term_weights(STEP, 0.3)).emptied()
    assert (empty.cu_seqlens.tolist(), len(empty.tokens), len(empty.better)) == ([0, 2], 2, 0)


def test_a_comparison_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no texts"):
        pack_comparisons([Comparison((), ())], TermWeights(1, 1))
