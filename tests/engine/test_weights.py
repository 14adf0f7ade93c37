"""HF directory -> megatron-core -> HF on real parallel layouts."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests import tiny_models
from tests.engine.conftest import LAYOUTS, Answers
from tests.tiny_models import VOCAB


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_back_bitwise_on_every_rank(layout: str, ranks: Answers, model_paths: dict[str, Path]) -> None:
    for rank in ranks:
        for model, answer in rank.items():
            with safe_open(model_paths[model] / "model.safetensors", "pt") as file:
                names = sorted(file.keys())
            for export in answer["weights"]:
                assert export["wrong"] == []
                assert Counter(export["names"]) == Counter(names), (model, export["limit"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_keep_their_limit(layout: str, ranks: Answers) -> None:
    """A bucket beyond the limit holds a single row: at most the three tensors of a query-key-value parameter."""
    for model, answer in ranks[0].items():
        one_each, small, unlimited = answer["weights"]
        largest = max(one_each["bytes"])
        assert max(small["bytes"]) <= max(small["limit"], largest)
        assert len(one_each["bytes"]) > len(small["bytes"]) > len(unlimited["bytes"])
        assert len(unlimited["bytes"]) == (2 if "pp2" in layout else 1), model
        assert sum(one_each["bytes"]) == sum(small["bytes"]) == sum(unlimited["bytes"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_directories_load_in_transformers_with_equal_logits(
    layout: str, ranks: Answers, model_paths: dict[str, Path]
) -> None:
    """Equal to the last bit: the weights are."""
    ids = torch.arange(3, 43)[None]
    for model, answer in ranks[0].items():
        saved, source = answer["saved"], model_paths[model]
        with torch.no_grad():
            assert torch.equal(tiny_models.load(saved)(ids).logits, tiny_models.load(source)(ids).logits)
        tensors = load_file(saved / "model.safetensors")
        assert tensors["model.embed_tokens.weight"].shape[0] == VOCAB
        assert ("lm_head.weight" in tensors) == (model in ("llama", "qwen2_untied"))
        assert sorted(p.name for p in saved.iterdir()) == sorted(p.name for p in source.iterdir())


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
        ("rope", ["rope_type=linear", "'default'"]),
        ("empty", ["has no config.json"]),
        ("no_weights", ["neither model.safetensors nor model.safetensors.index.json"]),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(variant: str, parts: list[str], single: list[Any]) -> None:
    message = single[0]["once"]["refusals"][variant]
    assert f"/{variant}" in message
    assert all(part in message for part in parts), message
