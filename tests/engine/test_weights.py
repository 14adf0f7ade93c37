"""HF directory -> megatron-core -> HF on real parallel layouts."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests import tiny_models
from tests.engine.conftest import Answers
from tests.engine.layouts import CASES, LAYOUTS
from tests.tiny_models import CONFIGS, VOCAB


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_weights_come_back_bitwise_on_every_rank(
    layout: str, model: str, ranks: Answers, model_paths: dict[str, Path]
) -> None:
    with safe_open(model_paths[model] / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
    for rank in ranks:
        for export in rank[model]["weights"]:
            assert export["wrong"] == []
            assert Counter(export["names"]) == Counter(names), export["limit"]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_buckets_keep_their_limit(layout: str, model: str, ranks: Answers) -> None:
    """A bucket beyond the limit holds the least that can be gathered: one parameter, or an expert of every rank.

    Without a limit there is one bucket per pipeline stage, and one more for the stage's experts.
    """
    one_each, small, unlimited = ranks[0][model]["weights"]
    largest = max(one_each["bytes"])
    assert max(small["bytes"]) <= max(small["limit"], largest)
    assert len(one_each["bytes"]) > len(small["bytes"]) > len(unlimited["bytes"])
    assert len(unlimited["bytes"]) == LAYOUTS[layout][1].pipeline * (2 if "moe" in model else 1)
    assert sum(one_each["bytes"]) == sum(small["bytes"]) == sum(unlimited["bytes"])


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_saved_directories_load_in_transformers_with_equal_logits(
    layout: str, model: str, ranks: Answers, model_paths: dict[str, Path]
) -> None:
    """Equal to the last bit: the weights are."""
    ids = torch.arange(3, 43)[None]
    saved, source = ranks[0][model]["saved"], model_paths[model]
    with torch.no_grad():
        assert torch.equal(tiny_models.load(saved)(ids).logits, tiny_models.load(source)(ids).logits)
    tensors = load_file(saved / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape[0] == VOCAB
    assert ("lm_head.weight" in tensors) != CONFIGS[model].tie_word_embeddings
    assert sorted(p.name for p in saved.iterdir()) == sorted(p.name for p in source.iterdir())
    # Rotary settings among them.
    assert (saved / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_sharded_directory_loads(single: Answers) -> None:
    assert single[0]["once"]["sharded"]


@pytest.mark.parametrize(
    ("variant", "parts"),
    [
        ("missing", ["has no tensor model.layers.2.mlp.up_proj.weight"]),
        (
            "renamed",
            ["has no tensor model.layers.2.mlp.up_proj.weight", "nearest there is model.layers.2.mlp.upproj.weight"],
        ),
        ("unknown", ["model.layers.2.mlp.up_proj.bias", "nearest known name is model.layers.2.mlp.up_proj.weight"]),
        ("misshapen", ["model.layers.2.mlp.up_proj.weight", "(159, 128)", "(160, 128)"]),
        ("family", ["model_type=gpt2", "llama, qwen2, qwen3"]),
        ("rope", ["rope_type=dynamic", "length of the sequence"]),
        ("empty", ["has no config.json"]),
        ("no_weights", ["neither model.safetensors nor model.safetensors.index.json"]),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(variant: str, parts: list[str], single: list[Any]) -> None:
    message = single[0]["once"]["refusals"][variant]
    assert f"/{variant}" in message
    assert all(part in message for part in parts), message
