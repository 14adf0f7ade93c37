"""The sizes of a model, and the layouts that they allow or refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.architecture import Architecture, Layout

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 12,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "head_dim": 64,
}
SPARSE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 60,
}


def test_sizes_are_those_of_the_config() -> None:
    """head_dim is the config's own, not hidden / heads (96 / 12 = 8)."""
    model = Architecture.of(DENSE)
    assert (model.head_dim, model.heads, model.groups, model.tied, model.experts) == (64, 12, 4, False, 0)
    assert (model.qk_norm, model.qkv_bias, any(model.sparse)) == (True, False, False)


def test_what_a_config_may_leave_out() -> None:
    some = {k: v for k, v in DENSE.items() if k not in ("head_dim", "num_key_value_heads")}
    model = Architecture.of(some | {"model_type": "qwen2"})
    assert (model.head_dim, model.groups) == (8, 12)
    assert (model.qk_norm, model.qkv_bias) == (False, True)


def test_both_names_of_the_number_of_experts() -> None:
    renamed = {("num_local_experts" if k == "num_experts" else k): v for k, v in SPARSE.items()}
    assert Architecture.of(renamed) == Architecture.of(SPARSE)


def test_the_example_s_model() -> None:
    file = Path(__file__).parent.parent / "examples" / "models" / "spark_tiny" / "config.json"
    model = Architecture.of(json.loads(file.read_text()))
    assert (model.family, model.layers, model.groups, model.tied) == ("qwen3", 4, 2, True)


@pytest.mark.parametrize(
    ("vocab", "tensor", "rows"),
    [(151936, 2, 151936), (151936, 8, 151936), (151937, 2, 151938), (301, 4, 304), (49152, 3, 49152), (7, 8, 8)],
)
def test_the_vocabulary_is_padded_once_and_only_to_the_ranks(vocab: int, tensor: int, rows: int) -> None:
    assert Architecture.of(DENSE | {"vocab_size": vocab}).padded_vocab(tensor) == rows


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (DENSE, {"tensor": 4, "pipeline": 3, "virtual": 4}),
        (DENSE, {"tensor": 2}),
        (DENSE | {"num_key_value_heads": 2}, {"tensor": 4}),
        (DENSE | {"num_key_value_heads": 1}, {"tensor": 4}),
        (DENSE, {"pipeline": 7}),  # embedding and head count as layers: 14
        (SPARSE, {"expert": 8, "pipeline": 12}),
        (SPARSE, {"expert": 2, "tensor": 4, "sequence": True}),
        # No layer is dense: the width of dense layers does not matter.
        (SPARSE | {"intermediate_size": 255}, {"tensor": 2, "sequence": True}),
    ],
)
def test_layouts_that_fit(config: dict[str, Any], layout: dict[str, Any]) -> None:
    Architecture.of(config).check(Layout(**layout))


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (DENSE, {"pipeline": 5}, "parallel.pipeline * parallel.virtual=5 does not divide the model's 12 layers"),
        (DENSE, {"pipeline": 4, "virtual": 2}, "parallel.virtual=8 does not divide the model's 12 layers"),
        (DENSE, {"tensor": 8}, "parallel.tensor=8 does not divide the model's 12 attention heads"),
        (DENSE, {"tensor": 3}, "parallel.tensor=3 neither divides the model's 4 key-value heads nor is a multiple"),
        (
            DENSE | {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 3},
            {"tensor": 16},
            "does not divide the model's 54 query, key and value rows",
        ),
        (DENSE | {"intermediate_size": 255}, {"tensor": 2}, "255 MLP width (intermediate_size)"),
        (DENSE, {"expert": 2}, "parallel.expert=2, but the model has no experts: set parallel.expert=1"),
        (SPARSE, {"expert": 3}, "parallel.expert=3 does not divide the model's 8 experts"),
        (
            SPARSE | {"moe_intermediate_size": 63},
            {"tensor": 2, "sequence": True},
            "63 expert width (moe_intermediate_size)",
        ),
        (SPARSE, {"tensor": 2}, "set parallel.sequence=true"),
        (
            SPARSE | {"intermediate_size": 255, "mlp_only_layers": [3]},
            {"tensor": 2, "sequence": True},
            "255 MLP width (intermediate_size)",
        ),
    ],
)
def test_layouts_that_do_not_fit(config: dict[str, Any], layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Architecture.of(config).check(Layout(**layout))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("layout", "world", "data"),
    [
        (Layout(), 4, 4),
        (Layout(tensor=2, pipeline=2), 8, 2),
        (Layout(context=2, expert=4), 8, 4),
        (Layout(tensor=2, sequence=True, pipeline=2, virtual=3), 4, 1),
    ],
)
def test_what_a_layout_leaves_to_data_parallelism(layout: Layout, world: int, data: int) -> None:
    assert layout.data(world) == data


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(tensor=0), "parallel.tensor=0 must be at least 1"),
        (lambda: Layout(virtual=2), "parallel.virtual=2 needs pipeline stages, but parallel.pipeline=1"),
        (lambda: Layout(sequence=True), "parallel.sequence=true needs parallel.tensor of 2 or more"),
        (lambda: Layout(tensor=2, context=2).data(6), "parallel.tensor=2 * parallel.pipeline=1 * parallel.context=2"),
        (lambda: Layout(expert=4).data(2), "parallel.expert=4 does not divide the 2 data and context ranks"),
    ],
)
def test_layouts_that_contradict_themselves(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
