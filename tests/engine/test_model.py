"""Models against transformers: logits of every family, refused directories, and every rank's part of many layouts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spark_megatron.engine import model as models
from spark_megatron.engine.parallel import Layout
from spark_megatron.engine.platform import CPU
from tests import distributed, tiny_models
from tests.engine.ranks_model import LARGE, LAYOUTS, QWEN2_5_32B, prompts, write_config
from tests.tiny_models import CONFIGS, VOCAB

ROUNDING = 2e-5
"""Logits of up to 5 in fp32, summed in another order."""

LOADED = ("llama3", "qwen2", "qwen3", "qwen3_moe_mixed")
"""Every kind of row; what the others add is in their config."""


def variants_of(paths: dict[str, Path], root: Path) -> dict[str, Path]:
    """Directories that hold a model in another form than ``paths``."""
    variants = {name: root / name for name in ("old form", "tied head saved", "tied in files")}
    shutil.copytree(paths["llama3"], variants["old form"])
    rope = dict(CONFIGS["llama3"].rope_parameters)
    theta = rope.pop("rope_theta")
    write_config(variants["old form"], {"rope_theta": theta, "rope_scaling": rope}, without=("rope_parameters",))
    shutil.copytree(paths["qwen2"], variants["tied head saved"])
    tensors = load_file(paths["qwen2"] / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, variants["tied head saved"] / "model.safetensors")
    tiny_models.load(paths["qwen2"]).save_pretrained(variants["tied in files"], max_shard_size="300KB")
    return variants


def broken_of(paths: dict[str, Path], root: Path) -> dict[str, Path]:
    """Directories of experts whose weights do not fit their config."""
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    tensors = load_file(paths["qwen3_moe_mixed"] / "model.safetensors")
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    changed = {
        "missing": without,
        "renamed": without | {name.replace("up_proj", "w3"): tensors[name]},
        "unknown": tensors | {name.replace("experts.3", "experts.4"): tensors[name].clone()},
        "misshapen": without | {name: tensors[name][:-1].clone()},
    }
    for variant, some in changed.items():
        (root / variant).mkdir(parents=True)
        save_file(some, root / variant / "model.safetensors")
        shutil.copyfile(paths["qwen3_moe_mixed"] / "config.json", root / variant / "config.json")
    return {variant: root / variant for variant in changed}


@pytest.fixture(scope="module")
def paths(model_directory: Any) -> dict[str, Path]:
    return {name: model_directory(name) for name in CONFIGS}


@pytest.fixture(scope="module")
def variants(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return variants_of(paths, tmp_path_factory.mktemp("variants"))


@pytest.fixture(scope="module")
def answers(
    paths: dict[str, Path], variants: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("model")
    (root / "out").mkdir()
    broken = broken_of(paths, root / "broken")
    function = "tests.engine.ranks_model:on_one_rank"
    arguments = {"paths": paths, "variants": variants, "broken": broken, "loaded_models": LOADED, "out": root / "out"}
    [answer] = distributed.run(1, function, root / "job", **arguments)
    return answer


@torch.no_grad()
def reference(model: Any) -> list[torch.Tensor]:
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a[:, :VOCAB] - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, answers: dict[str, Any], paths: dict[str, Path]) -> None:
    assert largest_difference(answers["logits"][name], reference(tiny_models.load(paths[name]))) < ROUNDING


@pytest.mark.parametrize("name", ["llama3", "llama_linear", "qwen2_yarn", "qwen3_yarn"])
def test_scaled_rotary_embeddings_matter(name: str, paths: dict[str, Path], tmp_path: Path) -> None:
    """So that the test before would see plain ones."""
    plain = shutil.copytree(paths[name], tmp_path / name)
    write_config(plain, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}})
    difference = largest_difference(reference(tiny_models.load(plain)), reference(tiny_models.load(paths[name])))
    assert difference > 1000 * ROUNDING


@pytest.mark.parametrize(
    ("variant", "same_as"), [("old form", "llama3"), ("tied head saved", "qwen2"), ("tied in files", "qwen2")]
)
def test_other_forms_of_a_directory(variant: str, same_as: str, answers: dict[str, Any]) -> None:
    """The rotary settings of transformers 4; a tied head that was written nevertheless; an index without a head."""
    assert all(map(torch.equal, answers["logits"][variant], answers["logits"][same_as]))


def test_the_form_of_transformers_4_is_the_old_one(variants: dict[str, Path]) -> None:
    old = json.loads((variants["old form"] / "config.json").read_text())
    assert "rope_parameters" not in old
    assert old["rope_scaling"]["rope_type"] == "llama3"


def test_a_directory_in_several_files(answers: dict[str, Any], paths: dict[str, Path]) -> None:
    """transformers loads it, to the last bit; a file holds no more than its limit, and a single one has no index."""
    expected = load_file(paths["qwen3_moe_mixed"] / "model.safetensors")
    several, one = answers["saved"]["several"], answers["saved"]["one"]
    files = sorted(several.glob("*.safetensors"))
    index = json.loads((several / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in paths["qwen3_moe_mixed"].iterdir())
    for tensors in (found, load_file(one / "model.safetensors")):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    loaded = reference(tiny_models.load(several))
    assert all(map(torch.equal, loaded, reference(tiny_models.load(paths["qwen3_moe_mixed"]))))


@pytest.mark.parametrize(
    ("variant", "parts"),
    [
        ("missing", ["has no tensor model.layers.2.mlp.experts.3.up_proj.weight"]),
        ("renamed", ["the nearest there is model.layers.2.mlp.experts.3.w3.weight"]),
        (
            "unknown",
            ["model.layers.2.mlp.experts.4.up_proj.weight", "nearest known name is model.layers.2.mlp.experts"],
        ),
        ("misshapen", ["model.layers.2.mlp.experts.3.up_proj.weight", "(63, 128)", "(64, 128)"]),
    ],
)
def test_experts_that_do_not_fit_are_refused(variant: str, parts: list[str], answers: dict[str, Any]) -> None:
    message = answers["refusals"][variant]
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("llama", {"model_type": "gpt2"}, ["model_type=gpt2", "llama, qwen2, qwen3, qwen3_moe"]),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type=dynamic", "length of the"]),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1] * 16,
                    "long_factor": [2] * 16,
                }
            },
            ["rope_type=longrope", "default, linear, llama3, yarn"],
        ),
        ("llama", {"rope_parameters": {"rope_type": "proportional"}}, ["rope_type=proportional", "yarn"]),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor=0.5"]),
        ("llama", {"attention_bias": True}, ["attention_bias=True", "only False"]),
        ("llama", {"mlp_bias": True}, ["mlp_bias=True"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias=True"]),
        ("qwen3", {"hidden_act": "gelu"}, ["hidden_act=gelu", "only silu"]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, ["sliding-window"]),
    ],
)
def test_a_config_that_is_not_supported_is_refused(
    name: str, changes: dict[str, Any], parts: list[str], paths: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copyfile(paths[name] / "config.json", tmp_path / "config.json")
    write_config(tmp_path, changes)
    with pytest.raises(ValueError) as error:
        models.read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)
    assert all(part in str(error.value) for part in parts), error.value


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.json: give a HF model directory"):
        models.read_config(tmp_path)


CASES = [(layout, m) for layout, (_, d) in LAYOUTS.items() for m in LOADED if d.expert == 1 or "moe" in m]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_every_rank_loads_its_part(layout: str, model: str, answers: dict[str, Any]) -> None:
    """Together the ranks hold all tensors to the last bit, in the expected shapes, having read nothing else."""
    answer = answers["layouts"][layout, model]
    assert answer == {"finite": True, "shapes": True, "excess": 0, "wrong": []}


@pytest.mark.parametrize("name", LARGE)
def test_models_of_30e9_parameters(name: str, answers: dict[str, Any]) -> None:
    """Built on 32 ranks without memory: the shapes are the table's, and add up to the published parameter counts."""
    answer = answers["large"][name]
    assert answer["fitting"]
    assert answer["held"] == answer["elements"]
    assert answer["elements"] == (32_763_876_352 if name.startswith("dense") else 30_532_122_624)


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="parallel.tensor=3 does not divide the model's 40 attention heads"):
        models.transformer_config(QWEN2_5_32B, Layout(tensor=3), torch.float32, CPU)


@pytest.mark.parametrize(("name", "before"), [("qwen3_moe", False), ("qwen3_moe_mixed", True)])
def test_the_order_of_softmax_and_choice(name: str, before: bool) -> None:
    config = models.transformer_config(CONFIGS[name], Layout(), torch.bfloat16, CPU)
    assert config.moe_router_pre_softmax == before
    assert config.moe_router_dtype == "fp32"
    assert config.moe_router_load_balancing_type == "none"


def test_the_factor_of_yarn_is_in_the_scale_of_the_scores() -> None:
    config = models.transformer_config(CONFIGS["qwen3_yarn"], Layout(), torch.float32, CPU)
    assert config.softmax_scale == pytest.approx(1.3**2 / math.sqrt(32))
    assert models.transformer_config(CONFIGS["llama3"], Layout(), torch.float32, CPU).softmax_scale is None
