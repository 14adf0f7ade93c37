"""vLLM's weight-transfer interface for a trainer that lives in the same process.

A module's parameters arrive as this worker's own shards, fused and ordered as vLLM's loaders would fill them. They take
the place of its parameters for a moment, vLLM processes them as after any load (packing, quantisation, ...), and the
result is copied into the memory that its kernels know: what vLLM's layerwise reload does, without buffers and copies on
the way. Three things need care on a CPU:

- a tied LM head keeps the packed copy of its old weights unless it is packed anew;
- an embedding would be packed too, although nothing ever multiplies with it;
- unquantised experts keep their old kernel, because they are packed at the first load only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from spark_megatron.rollout import fp8

BACKEND = "spark_in_process"

_SCALES = "_scale_inv"
"""What vLLM appends to a weight's name for its scales."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: both sides share the process."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """All parameters of one or several modules: this worker's shards by vLLM's names."""

    shards: dict[str, Tensor] = field(default_factory=dict)


class InProcessEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Installs shards in the running model between ``start_weight_update`` and ``finish_weight_update``."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        if current_platform.is_cpu():
            forget_expert_kernels(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.receive(update_info.shards)

    def receive(self, shards: Mapping[str, Tensor]) -> None:
        """All parameters of one or several modules: this worker's shards by vLLM's names."""
        for module, given in by_module(shards).items():
            install(self.model.get_submodule(module), given)

    def finish_weight_update(self) -> None:
        if current_platform.is_cpu():
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def by_module(shards: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Parameters by the name of their module, and by their name in it."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, shard in shards.items():
        module, _, parameter = name.rpartition(".")
        found.setdefault(module, {})[parameter] = shard
    return found


@torch.no_grad()
def install(module: Any, shards: Mapping[str, Tensor]) -> None:
    """Give ``module`` new values of all its parameters, in the form in which vLLM's loaders would leave them.

    Weights of a module that has scales are quantised.

    Raises:
        ValueError: a shard of another shape than the parameter, or not all parameters are given.
    """
    before = dict(module._parameters)
    kernel = {name: parameter for name, parameter in before.items() if parameter is not None}
    # vLLM keeps no other form of a bias.
    expected = get_layerwise_info(module).restore_metadata[0] | {k: p for k, p in kernel.items() if k == "bias"}
    given = quantised(shards, expected)
    if expected.keys() != given.keys():
        raise ValueError(f"{type(module).__name__} has the parameters {sorted(expected)}, it was given {sorted(given)}")
    for name, shard in given.items():
        if expected[name].shape != shard.shape:
            raise ValueError(
                f"{type(module).__name__}.{name} has the shape {tuple(expected[name].shape)}, its new values have "
                f"{tuple(shard.shape)}"
            )
        module._parameters[name] = _in_the_form_of(expected[name], shard)
    if _is_processed(module, kernel):
        module.__dict__.pop("cpu_linear", None)  # the old packed weights go before the new ones take memory
        module._already_called_process_weights_after_loading = False
        module.quant_method.process_weights_after_loading(module)
    for name, parameter in kernel.items():
        parameter.data.copy_(module._parameters[name])
    module._parameters.clear()
    module._parameters.update(before)


def quantised(shards: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shards, with values and scales in place of those weights of which ``expected`` has scales."""
    found = dict(shards)
    for name in shards:
        if f"{name}{_SCALES}" in expected:
            found[name], found[f"{name}{_SCALES}"] = fp8.quantise(found[name])
    return found


def _in_the_form_of(expected: Tensor, shard: Tensor) -> Tensor:
    """``shard`` as a parameter of the class and with the attributes that vLLM gave the parameter it loads into."""
    given = shard.detach()
    given.__class__ = expected.__class__
    given.__dict__ = expected.__dict__.copy()
    return given


def _is_processed(module: Any, kernel: Mapping[str, Tensor]) -> bool:
    """Whether new values have to be processed again before the kernels can use them."""
    if not isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
        return False
    if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
        return False
    # A CPU kernel that packs the weights of a linear layer takes them away; where they stay, they are used as they are.
    plain = isinstance(module.quant_method, UnquantizedLinearMethod) and kernel["weight"].numel() > 0
    return not (current_platform.is_cpu() and plain)


def repack_tied_head(model: Any) -> None:
    """Pack a tied LM head's weights anew, as vLLM does once after the first load."""
    head, embedding = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight:
        head.__dict__.pop("cpu_linear", None)  # the old packed weights go before the new ones take memory
        head.quant_method.process_weights_after_loading(head)


def forget_expert_kernels(model: Any) -> None:
    """Make vLLM build the experts' kernels again when their weights arrive."""
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def register() -> None:
    """Make the backend known to vLLM. Safe to call again."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcessEngine)
