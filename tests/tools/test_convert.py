"""Checkpoints become directories that transformers and vLLM load, and directories become checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import distributed
from tests.conftest import ModelDirectory

MODELS = ("qwen2", "qwen3_moe_mixed")


@pytest.fixture(scope="module", params=MODELS)
def answer(
    request: pytest.FixtureRequest, model_directory: ModelDirectory, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    model = model_directory(request.param)
    folder: Path = tmp_path_factory.mktemp("convert")
    trained, _ = distributed.run(
        2, "tests.tools.ranks_convert:saved", folder / "train", model=model, checkpoints=folder / "checkpoints"
    )
    [found] = distributed.run(
        1,
        "tests.tools.ranks_convert:converted",
        folder / "convert",
        model=model,
        checkpoint=folder / "checkpoints" / "step_00000001",
        out=folder,
    )
    return {**found, "trained": trained, "model": model, "folder": folder}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_trained_checkpoint_of_two_ranks_becomes_one_directory(answer: dict[str, Any]) -> None:
    """With the weights of after the update, to the last bit."""
    found = load_file(answer["folder"] / "hf" / "model.safetensors")
    assert_equal(found, answer["trained"])
    start = load_file(answer["model"] / "model.safetensors")
    assert not all(torch.equal(found[name], start[name]) for name in start)


def test_there_and_back(answer: dict[str, Any]) -> None:
    start = load_file(answer["model"] / "model.safetensors")
    assert_equal(load_file(answer["folder"] / "back" / "model.safetensors"), start)


def test_what_is_said(answer: dict[str, Any]) -> None:
    count = len(answer["trained"])
    for line in answer["said"]:
        assert f"{count} tensors equal to the last bit" in line


def test_vllm_loads_the_directory_from_disk(answer: dict[str, Any]) -> None:
    """fp32 on both sides: rounding gives about 1e-5."""
    assert answer["vllm"] < 1e-4


def test_what_cannot_be_right_is_refused(answer: dict[str, Any]) -> None:
    assert "is not what was converted" in answer["spoiled"]
    assert "name its directory with --model" in answer["nameless"]
    assert "manifest.json cannot be read" in answer["no checkpoint"]
