"""What a sampling backend cannot do is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from spark_megatron import runtime
from spark_megatron.architecture import Architecture
from spark_megatron.rollout.fit import check_backend, kv_cache_bytes
from spark_megatron.schema import ConfigError
from tests.settings import SHAPE, save_shape, typed

MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "has_gpu", lambda: False)


def test_memory_is_that_of_the_blocks_of_one_sequence_and_an_empty_one() -> None:
    """4 layers of 2 key-value heads of 8 numbers of 4 bytes: 512 bytes a token, 65536 a block of 128 tokens."""
    model = Architecture.of(SHAPE)
    assert kv_cache_bytes(model, "fp32", 1, 128) == 2 * 65536
    assert kv_cache_bytes(model, "fp32", 1, 129) == 3 * 65536
    assert kv_cache_bytes(model, "bf16", 1, 129) == 3 * 65536 / 2
    assert kv_cache_bytes(model, "fp32", 2, 129) == 3 * 65536 / 2
    assert kv_cache_bytes(model, "fp32", 4, 129) == 3 * 65536 / 2, "every rank has a head at least"


def test_blocks_are_smaller_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "has_gpu", lambda: True)
    assert kv_cache_bytes(Architecture.of(SHAPE), "fp32", 1, 129) == 10 * 16 * 512


def test_the_smallest_memory_that_works_is_named(tmp_path: Path) -> None:
    """1921 tokens are 16 blocks of 64 KiB, and one more stays empty."""
    settings = ("rollout.backend.max_model_len=1921", "rollout.backend.kv_cache_mb=")
    check_backend(typed(tmp_path, settings[0], f"{settings[1]}2"))
    with pytest.raises(ConfigError) as refused:
        check_backend(typed(tmp_path, settings[0], f"{settings[1]}1"))
    assert str(refused.value) == (
        "rollout.backend.kv_cache_mb=1 cannot hold the keys and values of one sequence of "
        "rollout.backend.max_model_len=1921 tokens: set it to 2 or more"
    )


@pytest.mark.parametrize(
    ("overrides", "shape", "message"),
    [
        ("rollout.backend.max_model_len=12", {}, "rollout.max_new_tokens=12 leaves no room for a prompt in "
         "rollout.backend.max_model_len=12 tokens: lower the one or raise the other"),
        ("eval.max_new_tokens=200", {}, "eval.max_new_tokens=200 leaves no room for a prompt in "
         "rollout.backend.max_model_len=128 tokens: lower the one or raise the other"),
        ("rollout.probe_tokens=128", {}, "rollout.probe_tokens=128 leaves no room for a prompt in "
         "rollout.backend.max_model_len=128 tokens: lower the one or raise the other"),
        ("rollout.backend.tensor_parallel=3", {}, "rollout.backend.tensor_parallel=3 does not divide parallel.ranks=2: "
         "choose a degree that does"),
        ("rollout.backend.tensor_parallel=0", {}, "rollout.backend.tensor_parallel=0 does not divide parallel.ranks=2: "
         "choose a degree that does"),
        ("rollout.backend.tensor_parallel=2", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8},
         "rollout.backend.tensor_parallel=2 does not divide the model's 3 attention heads: choose a degree that does"),
        ("rollout.backend.tensor_parallel=2", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
         "rollout.backend.tensor_parallel=2 neither divides the model's 3 key-value heads nor is a multiple of them: "
         "choose a degree that does or is"),
        ("rollout.backend.tensor_parallel=2", {"intermediate_size": 63}, "rollout.backend.tensor_parallel=2 does not "
         "divide the model's 63 MLP width (intermediate_size): choose a degree that does"),
        ("rollout.backend.tensor_parallel=2", {**MOE, "moe_intermediate_size": 47}, "rollout.backend.tensor_parallel=2 "
         "does not divide the model's 47 expert width (moe_intermediate_size): choose a degree that does"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, overrides: str, shape: dict[str, Any], message: str) -> None:
    folder = save_shape(tmp_path / "other", **shape)
    config = typed(tmp_path, "parallel.tensor=1", overrides, f"model.path={folder}")
    with pytest.raises(ConfigError) as refused:
        check_backend(config)
    assert str(refused.value) == message


@pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 1}, {**MOE, "intermediate_size": 63}])
def test_what_fits_passes(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Also fewer key-value heads than ranks, and a dense width that no layer of a mixture has."""
    folder = save_shape(tmp_path / "other", **shape)
    check_backend(typed(tmp_path, "parallel.tensor=1", "rollout.backend.tensor_parallel=2", f"model.path={folder}"))


@pytest.mark.parametrize("absent", ["tensor_parallel", "max_model_len", "kv_cache_mb"])
def test_a_backend_without_such_a_setting_is_left_to_itself(tmp_path: Path, absent: str) -> None:
    settings = {"tensor_parallel": 2, "max_model_len": 100, "kv_cache_mb": 0 if absent != "kv_cache_mb" else 64}
    given = [f"rollout.backend.{name}={value}" for name, value in settings.items()]
    check_backend(typed(tmp_path, *given, f"~rollout.backend.{absent}"))
