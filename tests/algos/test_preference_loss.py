"""The loss of pairs and labels against values worked out by hand."""

import math

import pytest
import torch

from spark_megatron.algos.preference_loss import comparison_loss, margins
from spark_megatron.types import Comparisons


def batch(better: list[int], worse: list[int], weight: list[float]) -> Comparisons:
    return Comparisons(
        torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        torch.zeros(6, dtype=torch.long),
        torch.tensor(better, dtype=torch.long),
        torch.tensor(worse, dtype=torch.long),
        torch.tensor(weight),
    )


def test_margins_by_hand() -> None:
    """A pair, a right text, a wrong text."""
    found = margins(torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0, 2, -1]), torch.tensor([1, -1, 1]))
    assert found.tolist() == [3.0, 0.5, 1.0]


def test_a_pair_by_hand() -> None:
    """-log sigmoid(2 - (-1)) = log(1 + exp(-3)) = 0.0485874; at equal scores log 2."""
    loss, stats = comparison_loss(torch.tensor([2.0, -1.0, 7.0]), batch([0], [1], [1.0]))
    assert float(loss) == pytest.approx(0.04858735)
    assert {key: float(x) for key, x in stats.items()} == pytest.approx(
        {"loss": 0.04858735, "pairs": 1, "pair_right": 1, "pair_loss": 0.04858735, "labels": 0, "label_right": 0,
         "label_loss": 0}
    )  # fmt: skip
    assert float(comparison_loss(torch.tensor([4.0, 4.0, 0.0]), batch([0], [1], [1.0]))[0]) == pytest.approx(
        math.log(2)
    )


def test_a_label_is_binary_cross_entropy() -> None:
    """Of a right text with logit 2: log(1 + exp(-2)) = 0.126928; of a wrong one with logit -1: 0.313262."""
    scores = torch.tensor([2.0, -1.0, 0.0])
    loss, stats = comparison_loss(scores, batch([0, -1], [-1, 1], [0.5, 0.5]))
    assert float(loss) == pytest.approx((0.12692801 + 0.31326169) / 2)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores[:2], torch.tensor([1.0, 0.0]))
    assert float(loss) == pytest.approx(float(expected))
    assert (stats["labels"], stats["label_right"], stats["pairs"]) == (2, 2, 0)


def test_the_gradient_by_hand() -> None:
    """d/d margin -log sigmoid = -sigmoid(-margin), to the better one, and its opposite to the worse."""
    scores = torch.tensor([2.0, -1.0, 0.5], requires_grad=True)
    comparison_loss(scores, batch([0, 2], [1, -1], [2.0, 1.0]))[0].backward()
    low, half = 1 / (1 + math.exp(3)), 1 / (1 + math.exp(0.5))
    assert scores.grad is not None
    assert scores.grad.tolist() == pytest.approx([-2 * low, 2 * low, -half])


def test_no_terms_are_a_zero_with_a_gradient() -> None:
    scores = torch.tensor([2.0, -1.0, 0.5], requires_grad=True)
    loss, stats = comparison_loss(scores, batch([], [], []))
    loss.backward()
    assert scores.grad is not None
    assert (float(loss), scores.grad.tolist(), float(stats["pairs"])) == (0.0, [0.0, 0.0, 0.0], 0.0)


def test_huge_margins_stay_finite() -> None:
    scores = torch.tensor([-300.0, 300.0, 0.0], requires_grad=True)
    loss, _ = comparison_loss(scores, batch([0], [1], [1.0]))
    loss.backward()
    assert float(loss) == 600.0
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_terms_of_unequal_number_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per term"):
        comparison_loss(torch.zeros(3), batch([0, 1], [1], [1.0]))
