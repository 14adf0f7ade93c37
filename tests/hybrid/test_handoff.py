"""Hand-overs from real trainer layouts to real vLLM engines, and planted faults that the probe must find.

Bound: fp32 on both sides differs by a few 1e-6 nats; each planted fault moves a log-prob by at least 1e-2.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import distributed, tiny_models
from tests.conftest import ModelDirectory

NEAR = 1e-4
CASES = [("qwen2", "tp2", 1), ("qwen2", "pp2", 1), ("qwen2", "pp2", 2), ("qwen3", "tp2", 1), ("qwen3", "pp2", 1)]
"""Model, trainer layout, ranks per sampler."""


@pytest.fixture(scope="module")
def paths(model_directory: ModelDirectory) -> dict[str, Path]:
    return {name: model_directory(name) for name in ("qwen2", "qwen3")}


@pytest.fixture(scope="module")
def ranks(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("handoff") / "job"
    return distributed.run(2, "tests.hybrid.ranks_handoff:on_all_layouts", folder, models=paths)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sampler_computes_with_the_updated_weights(
    case: tuple[str, str, int], ranks: list[dict[Any, Any]], paths: dict[str, Path]
) -> None:
    """Against transformers with the exported weights, on every rank."""
    for rank in ranks:
        answer = rank[case]
        model = tiny_models.load(paths[case[0]])
        missing, unexpected = model.load_state_dict(answer["weights"], strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        worst = 0.0
        for request, rollouts in answer["rollouts"]:
            for rollout in rollouts:
                expected = tiny_models.response_logprobs(model, request.prompt, rollout.tokens, request.temperature)
                worst = max(worst, (expected - torch.tensor(rollout.logprobs)).abs().max().item())
        assert worst < NEAR
        assert answer["error"] < NEAR


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_move_only_when_they_changed(case: tuple[str, str, int], ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        answer = rank[case]
        assert answer["starts"] == [1, 2], "at first, not again, then after the update"
        assert answer["repeats"], "and what is sampled in between repeats"
        before, after = answer["versions"]
        assert after == {answer["engine_version"]}
        assert before == {answer["engine_version"] - 1}


def test_each_sampler_knows_its_place(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["qwen2", "pp2", 1]["replica"] for rank in ranks] == [(0, 2), (1, 2)]
    assert [rank["qwen2", "pp2", 2]["replica"] for rank in ranks] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("fault", ["swapped", "dropped", "stale head", "stale version"])
def test_the_probe_finds(fault: str, ranks: list[dict[Any, Any]]) -> None:
    """The error names the weights, the difference and the setting with its bound; a good hand-over then works."""
    for rank in ranks:
        found = rank["faults"][fault]
        assert found["error"] > 1e-2
        assert f"weights {found['version']}" in found["message"]
        assert f"{found['error']:.2e}" in found["message"]
        assert "rollout.max_logprob_error=0.001" in found["message"]
        assert found["after"] < NEAR


def test_a_sampler_without_a_model_is_not_compared(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["without_model"] for rank in ranks] == [0, 0]
