"""The reward model on a real engine: what it gives to rollouts, and what it learns, on every layout."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from spark_megatron.data.pairs import Pair
from spark_megatron.data.triples import Triple
from spark_megatron.data.verify_text import encode_verify
from spark_megatron.types import Group, Rollout, Task
from tests import distributed
from tests.trainers.ranks_reward_model import LAYOUTS

MODEL = "examples/models/spark_tiny"
LONG = " 1 2 3" * 20
TASKS = [Task(str(i), "solve", f"Solve: {i} + 2", str(i + 2), "math", f"{i} + 2") for i in range(3)]
TEXTS = [["\\boxed{2}", " 3 \\boxed{ 3}", "no"], ["\\boxed{4}", LONG, ""], ["\\boxed{4}", "\\boxed{5}", "\\boxed{6}"]]
GROUPS = [
    Group(task, (1,), tuple(Rollout((1,), (0.0,), text, "stop", 0) for text in texts))
    for task, texts in zip(TASKS, TEXTS, strict=True)
]
PAIRS = [
    Pair(TASKS[0], "\\boxed{2}", "\\boxed{9}"),
    Pair(TASKS[2], "\\boxed{4}", "\\boxed{5}"),
    Pair(TASKS[1], LONG + "\\boxed{3}", "\\boxed{1}"),
]
TRIPLES = [Triple("1 + 1", "2", "\\boxed{2}", True), Triple("1 + 1", "2", "\\boxed{3}", False)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reward_model")
    function = "tests.trainers.ranks_reward_model:on_all_layouts"
    return distributed.run(
        2, function, folder / "job", path=MODEL, out=folder, groups=GROUPS, pairs=PAIRS, triples=TRIPLES
    )


@pytest.fixture(scope="module")
def logit() -> Callable[[Task, str], float]:
    """The score of transformers, with the head that the seed draws."""
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    model.score.weight.data = torch.randn(1, model.config.hidden_size, generator=generator) * 0.02
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def score(task: Task, text: str) -> float:
        with torch.no_grad():
            ids = torch.tensor([encode_verify(tokenizer, task.question, task.answer, text)])
            return float(model(ids).logits[0, 0])

    return score


@pytest.mark.parametrize("layout", LAYOUTS)
def test_probabilities_are_those_of_transformers_in_order(
    layout: str, job: list[dict[str, Any]], logit: Callable[[Task, str], float]
) -> None:
    expected = [[1 / (1 + math.exp(-logit(group.task, r.text))) for r in group.rollouts] for group in GROUPS]
    assert len({p for row in expected for p in row}) == 9
    for rank in job:
        for found, wanted in zip(rank[layout]["start"], expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
        assert rank[layout]["none"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_and_labels_are_learned_alike_on_every_layout(layout: str, job: list[dict[str, Any]]) -> None:
    """The masked mean of -log sigmoid of the difference falls; half of an anchor's mean is added."""
    reference = job[0]["dp2"]
    for rank in job:
        answer = rank[layout]
        losses = [stats["pair_loss"] for stats in answer["pairs"]]
        assert losses[0] > losses[1] > losses[2]
        assert answer["pairs"][0]["loss"] == pytest.approx(losses[0])
        anchored = answer["anchored"]
        assert anchored["loss"] == pytest.approx(anchored["pair_loss"] + 0.5 * anchored["label_loss"])
        assert answer["labels"]["loss"] == pytest.approx(answer["labels"]["label_loss"])
        for name in ("anchored", "labels"):
            assert answer[name] == pytest.approx(reference[name], rel=1e-4)
        assert "label_loss" not in answer["pairs"][0]


def test_the_first_loss_is_the_mean_of_the_pairs(
    job: list[dict[str, Any]], logit: Callable[[Task, str], float]
) -> None:
    margins = [logit(pair.task, pair.right) - logit(pair.task, pair.wrong) for pair in PAIRS]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / 3
    for layout in LAYOUTS:
        found = job[0][layout]["pairs"][0]
        assert found["loss"] == pytest.approx(expected, rel=1e-5)
        assert found["pair_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 3)


def test_no_pair_changes_nothing(job: list[dict[str, Any]]) -> None:
    for layout in LAYOUTS:
        assert job[0][layout]["moved_by_nothing"] == []
        assert job[0][layout]["nothing"]["loss"] == 0


def test_texts_that_are_too_long_for_the_model_are_masked(job: list[dict[str, Any]]) -> None:
    for rank in job:
        short = rank["dp2"]["short"]
        assert [p is None for row in short for p in row] == [text == LONG for texts in TEXTS for text in texts]
        assert rank["dp2"]["cut"] == 1
