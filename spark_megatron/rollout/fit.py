"""Whether a sampling backend can work with a model and a layout: arithmetic, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_megatron import runtime
from spark_megatron.architecture import Architecture
from spark_megatron.checks import described
from spark_megatron.config import Config, ModelConfig
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.schema import ConfigError

_ITEMSIZE = {"fp32": 4, "bf16": 2}
_MIB = 1 << 20


def check_backend(config: Config) -> None:
    """Check the sampling backend of a training run, as far as it has the arguments in question.

    Raises:
        ConfigError: names the setting, its value and one that works.
    """
    asked = {
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
        "eval.max_new_tokens": config.eval.max_new_tokens,
        "rollout.probe_tokens": config.rollout.probe_tokens,
    }
    check_sampler(config.rollout.backend, config.model, ("parallel.ranks", config.parallel.ranks), asked)
    if config.rollout.backend.get("weights") == "fp8_blocks":
        _check_fp8(config)


def check_sampler(backend: Mapping[str, Any], of: ModelConfig, job: tuple[str, int], asked: Mapping[str, int]) -> None:
    """Check what ``rollout.backend`` says of lengths, ranks and memory.

    ``job`` is the setting with the number of ranks and its value, ``asked`` has the settings with the numbers of new
    tokens.

    Raises:
        ConfigError: names the setting, its value and one that works.
    """
    model, _ = described(f"model.path={of.path}", Path(of.path) / "config.json")
    if "max_model_len" in backend:
        _check_lengths(asked, backend["max_model_len"])
    if "tensor_parallel" in backend:
        _check_ranks(job, model, backend["tensor_parallel"])
    if backend.keys() >= {"kv_cache_mb", "max_model_len", "tensor_parallel"}:
        given, longest = backend["kv_cache_mb"], backend["max_model_len"]
        needed = kv_cache_bytes(model, of.dtype, backend["tensor_parallel"], longest)
        if given * _MIB < needed:
            raise ConfigError(
                f"rollout.backend.kv_cache_mb={given} cannot hold the keys and values of one sequence of "
                f"rollout.backend.max_model_len={longest} tokens: set it to {-(-needed // _MIB)} or more"
            )


def kv_cache_bytes(model: Architecture, dtype: str, tensor_parallel: int, tokens: int) -> int:
    """Bytes per rank with which vLLM can sample a sequence of ``tokens`` tokens: its blocks and one that stays empty.

    A token has a key and a value per layer and key-value head of the rank. Blocks have 128 tokens on a CPU and 16 on a
    GPU, where some attention kernels take larger ones: vLLM itself has the last word.
    """
    heads = max(1, model.groups // tensor_parallel)
    block = 16 if runtime.has_gpu() else 128
    blocks = -(-tokens // block) + 1
    return blocks * block * 2 * model.layers * heads * model.head_dim * _ITEMSIZE[dtype]


def _check_lengths(asked: Mapping[str, int], longest: int) -> None:
    for name, new in asked.items():
        if new >= longest:
            raise ConfigError(
                f"{name}={new} leaves no room for a prompt in rollout.backend.max_model_len={longest} tokens: lower "
                "the one or raise the other"
            )


def _check_fp8(config: Config) -> None:
    from spark_megatron.rollout import fp8  # it loads torch

    model, _ = described(f"model.path={config.model.path}", Path(config.model.path) / "config.json")
    degree = config.rollout.backend["tensor_parallel"]

    name = "rollout.backend.weights=fp8_blocks"
    lacking = fp8.missing(runtime.has_gpu())
    if lacking:
        raise ConfigError(f"{name}: {lacking}: set it to same")
    if config.correction["_target_"].endswith(".no_correction"):
        raise ConfigError(f"{name}, but correction=none: its rounding has to be corrected, add correction=truncated")
    where = fp8.unaligned(model, vllm_rows(model), degree)
    if where:
        raise ConfigError(
            f"{name} with rollout.backend.tensor_parallel={degree} cuts {where} inside of a block of {fp8.BLOCK}: "
            "choose another degree, or set it to same"
        )


def _check_ranks(job: tuple[str, int], model: Architecture, degree: int) -> None:
    name, (setting, ranks) = f"rollout.backend.tensor_parallel={degree}", job
    if degree < 1 or ranks % degree:
        raise ConfigError(f"{name} does not divide {setting}={ranks}: choose a degree that does")
    sizes = {"attention heads": model.heads}
    if not all(model.sparse):
        sizes["MLP width (intermediate_size)"] = model.ffn
    if model.experts:
        sizes["expert width (moe_intermediate_size)"] = model.expert_ffn
    for what, size in sizes.items():
        if size % degree:
            raise ConfigError(f"{name} does not divide the model's {size} {what}: choose a degree that does")
    if model.groups % degree and degree % model.groups:
        raise ConfigError(
            f"{name} neither divides the model's {model.groups} key-value heads nor is a multiple of them: choose a "
            "degree that does or is"
        )
