"""What a vLLM model computes with, asked of its modules: their tensors may be packed, re-laid or quantised.

A linear layer applied to unit vectors answers with its weights, whatever its kernel has made of them; the products with
one and zero are exact, so that any difference is a difference of the weights. Of a head, whose rows are many, some
columns answer for all. Experts, which are not linear, are packed once more from the expected values and compared in
packed form, which is possible on a CPU only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from spark_megatron.rollout.weight_transfer import by_module

_UNIT_VECTORS = 1024
"""Unit vectors at a time, which bounds the memory of an answer."""

_HEAD_COLUMNS = 64
"""How many columns of a head are asked for."""


@torch.no_grad()
def differing(model: Any, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which parameters are not exactly ``shards`` (this worker's, whole modules by name), and where: bool [first
    dimension]. Parameters without a difference are left out; a tied head that differs from the embedding is
    "lm_head.weight"."""
    found: dict[str, Tensor] = {}
    for name, given in by_module(shards).items():
        module = model.get_submodule(name)
        for parameter, differs in _differences(module, given).items():
            found[f"{name}.{parameter}"] = differs
        head = getattr(model, "lm_head", None)
        if isinstance(module, VocabParallelEmbedding) and head is not None and head.weight is module.weight:
            found["lm_head.weight"] = _asked(head, given["weight"])
    return {name: differs for name, differs in found.items() if differs.any()}


def _differences(module: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if any(name.endswith("_scale_inv") for name in get_layerwise_info(module).restore_metadata[0]):
        return {}  # quantised: never exactly what was given
    if "w13_weight" in given:
        return _expert_differences(module, given)
    found = {name: _rows(getattr(module, name), values) for name, values in given.items() if name != "weight"}
    if "weight" in given:
        weight = module.weight
        # Weights that a kernel has taken away or copied must be asked for; others are used as they are.
        asked = hasattr(module, "quant_method") and (weight.shape != given["weight"].shape or _is_head(module))
        found["weight"] = _asked(module, given["weight"]) if asked else _rows(weight, given["weight"])
    return found


def _is_head(module: Any) -> bool:
    return isinstance(module, ParallelLMHead)


def _rows(held: Tensor, expected: Tensor) -> Tensor:
    unequal = held.to(expected.dtype) != expected
    return unequal.flatten(1).any(1) if unequal.ndim > 1 else unequal


def _asked(layer: Any, expected: Tensor) -> Tensor:
    """Which rows of ``expected`` [outputs, inputs] a linear layer does not compute with."""
    outputs, inputs = expected.shape
    columns = torch.arange(inputs, device=expected.device)
    if _is_head(layer):
        columns = columns[:: -(-inputs // _HEAD_COLUMNS)]
    found = torch.zeros(outputs, dtype=torch.bool, device=expected.device)
    for some in columns.split(_UNIT_VECTORS):
        units = torch.zeros(len(some), inputs, dtype=expected.dtype, device=expected.device)
        units[torch.arange(len(some)), some] = 1
        answers = layer.quant_method.apply(layer, units).view(len(some), outputs)
        found |= (answers.t() != expected[:, some]).any(1)
    return found


def _expert_differences(module: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By expert; empty where the experts' kernel does not say how it packs."""
    kernel = module.quant_method.moe_kernel
    if kernel is None or not all(tensor.is_cpu for tensor in given.values()):
        return {}
    expected = torch.nn.Module()
    for name, tensor in given.items():
        expected.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    kernel.fused_experts.process_weights_after_loading(expected)
    return {name: _rows(getattr(module, name), getattr(expected, name)) for name in given}
