"""Models with a scalar head on every parallel layout against transformers' classifiers and torch's AdamW, in fp32."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import distributed, tiny_models
from tests import training_rows as step
from tests.engine import score_rows
from tests.engine.layouts import SCORE_LAYOUTS
from tests.engine.test_engine import NEAR, assert_near

CASES = [(layout, model) for layout, (_, _, models) in SCORE_LAYOUTS.items() for model in models]


@pytest.fixture(scope="session")
def score_paths(model_directory: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Language models, tied and untied, that get a scalar head; and a directory that has one."""
    classifier = tmp_path_factory.mktemp("scores") / "classifier"
    score_rows.save_classifier("qwen2", classifier)
    return {name: model_directory(name) for name in ("qwen2", "llama3", "qwen3_moe")} | {"classifier": classifier}


@pytest.fixture(scope="session")
def jobs(score_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The answers of the ranks of jobs of one, two and four ranks, and the folders of what they saved."""
    answers = {}
    for ranks in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"scores_{ranks}")
        function = "tests.engine.ranks_scores:on_all_layouts"
        answers[ranks] = (
            distributed.run(ranks, function, folder / "job", score_paths=score_paths, out=folder),
            folder,
        )
    return answers


@pytest.fixture
def found(layout: str, model: str, jobs: dict[int, Any]) -> list[dict[str, Any]]:
    """Every rank's answer on the test's layout and model."""
    return [rank[f"{layout}/{model}"] for rank in jobs[SCORE_LAYOUTS[layout][0]][0]]


@pytest.fixture
def start(layout: str, model: str, jobs: dict[int, Any]) -> Path:
    """What the engine saved before its first update."""
    folder: Path = jobs[SCORE_LAYOUTS[layout][0]][1]
    return folder / f"{layout}_{model}"


@cache
def _oracle(path: Path, rows: int = 9) -> step.Oracle:
    return score_rows.oracle(score_rows.load_classifier(path), score_rows.comparisons(rows))


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_scores_are_those_of_transformers(found: list[dict[str, Any]], start: Path) -> None:
    """From the directory that the engine saves; on every rank, for every packed sequence."""
    loaded = score_rows.load_classifier(start)
    for rank in found:
        for batch, scores in zip(rank["batches"], rank["scores"], strict=True):
            with torch.no_grad():
                expected = score_rows.model_scores(loaded, batch)
            assert expected.std() > 0.01 or len(expected) < 3
            torch.testing.assert_close(scores, expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_gradients_and_three_updates_equal_torch_adamw(
    found: list[dict[str, Any]], jobs: dict[int, Any], model: str
) -> None:
    expected = _oracle(jobs[1][1] / f"single_{model}")
    for rank in found:
        assert rank["version"] == step.UPDATES
        for stats, wanted in zip(rank["stats"], expected.stats, strict=True):
            assert_near(stats, wanted)
    assert found[0]["gradient"].keys() == found[0]["after"].keys() == expected.after.keys()
    for name, tensor in expected.gradient.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(found[0]["gradient"][name], tensor, rtol=0, atol=NEAR * scale)
        torch.testing.assert_close(found[0]["after"][name], expected.after[name], rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("layout", ["dp2", "pp2_vp2"])
def test_ranks_without_comparisons_take_part(layout: str, jobs: dict[int, Any]) -> None:
    expected = _oracle(jobs[1][1] / "single_qwen2", rows=1)
    for rank in jobs[2][0]:
        for stats, wanted in zip(rank[f"idle_{layout}"]["stats"], expected.stats, strict=True):
            assert_near(stats, wanted)


def test_a_language_model_gets_a_head_that_its_seed_draws(jobs: dict[int, Any], score_paths: dict[str, Path]) -> None:
    """The body stays the file's; the head is small, and a model that has one keeps it."""
    first, again, other = jobs[1][0][0]["seeds"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std() == pytest.approx(0.02, rel=0.3)
    saved = score_rows.load_classifier(jobs[1][1] / "single_qwen2").state_dict()
    body = tiny_models.load(score_paths["qwen2"]).state_dict()
    assert all(torch.equal(tensor, body[name]) for name, tensor in saved.items() if name != "score.weight")
    kept = score_rows.load_classifier(jobs[1][1] / "single_classifier").state_dict()
    given = score_rows.load_classifier(score_paths["classifier"]).state_dict()
    assert all(torch.equal(tensor, given[name]) for name, tensor in kept.items())


def test_the_saved_config_is_that_of_a_classifier_with_padding(jobs: dict[int, Any]) -> None:
    config = json.loads((jobs[1][1] / "single_llama3" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert len(config["id2label"]) == 1
    assert config["pad_token_id"] is not None


def test_bf16_follows_fp32(jobs: dict[int, Any]) -> None:
    """8 bits through four layers: scores within 5 % of their spread, the loss within 2 %."""
    job = jobs[1][0][0]
    exact, rounded = torch.cat(job["single/qwen2"]["scores"]), torch.cat(job["bf16"]["scores"])
    assert (exact - rounded).abs().max() < 0.05 * (exact.max() - exact.min())
    assert job["bf16"]["stats"]["loss"] == pytest.approx(job["single/qwen2"]["stats"][0]["loss"], rel=0.02)


def test_a_checkpoint_goes_on_with_the_same_bits(jobs: dict[int, Any]) -> None:
    assert all(jobs[1][0][0]["resumed"].values())
