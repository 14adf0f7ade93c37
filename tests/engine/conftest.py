"""The answers of the engine's ranks, asked for once and shared by the tests of this folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import distributed, tiny_models
from tests.engine.layouts import LAYOUTS, MODELS

Answers = list[dict[str, Any]]
"""Per rank: {layout: {model: {check: answer}}} and some single answers (see ``ranks_engine.on_all_layouts``)."""


def broken_directories(good: Path, root: Path) -> dict[str, Path]:
    """Copies of a llama directory that its config.json does not fit."""
    tensors = load_file(good / "model.safetensors")
    config = json.loads((good / "config.json").read_text())
    name = "model.layers.2.mlp.up_proj.weight"
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "missing": (without, config),
        "renamed": (without | {name.replace("up_proj", "upproj"): tensors[name]}, config),
        "unknown": (tensors | {"model.layers.2.mlp.up_proj.bias": tensors[name][:, 0].clone()}, config),
        "misshapen": (without | {name: tensors[name][:-1].clone()}, config),
        "family": (tensors, config | {"model_type": "gpt2"}),
        "rope": (tensors, config | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}}),
    }
    for variant, (some, settings) in variants.items():
        (root / variant).mkdir()
        save_file(some, root / variant / "model.safetensors")
        (root / variant / "config.json").write_text(json.dumps(settings))
    (root / "empty").mkdir()
    (root / "no_weights").mkdir()
    shutil.copyfile(good / "config.json", root / "no_weights" / "config.json")
    return {name: root / name for name in (*variants, "empty", "no_weights")}


@pytest.fixture(scope="session")
def model_paths(model_directory: Any) -> dict[str, Path]:
    paths = {name: model_directory(name) for name in MODELS}
    (paths["qwen2"] / "tokenizer_config.json").write_text('{"note": "copied as it is"}')
    return paths


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, model_paths: dict[str, Path]) -> Answers:
    """One rank."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "broken").mkdir()
    tiny_models.load(model_paths["llama"]).save_pretrained(folder / "sharded", max_shard_size="300KB")
    broken = broken_directories(model_paths["llama"], folder / "broken")
    return _answers(1, folder, model_paths, broken=broken, sharded=folder / "sharded")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, model_paths: dict[str, Path]) -> Answers:
    """Two ranks."""
    return _answers(2, tmp_path_factory.mktemp("pair"), model_paths)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory, model_paths: dict[str, Path]) -> Answers:
    """Four ranks."""
    return _answers(4, tmp_path_factory.mktemp("four"), model_paths)


def _answers(ranks: int, folder: Path, model_paths: dict[str, Path], **arguments: Any) -> Answers:
    function = "tests.engine.ranks_engine:on_all_layouts"
    return distributed.run(ranks, function, folder / "job", model_paths=model_paths, out=folder, **arguments)


@pytest.fixture
def ranks(layout: str, request: pytest.FixtureRequest) -> Answers:
    """Every rank's {model: {check: answer}} on the test's ``layout``; starts only the job that has it."""
    job = {1: "single", 2: "pair", 4: "four"}[LAYOUTS[layout][0]]
    return [rank[layout] for rank in request.getfixturevalue(job)]
