"""vLLM's weight-transfer interface for a trainer that lives in the same process.

Tensors are passed by reference; vLLM narrows each to its own slice and re-packs the layer (its layerwise reload). On a
CPU two things are not refreshed by that reload and are repaired here:

- a tied LM head keeps the packed copy of its old weights (only the embedding is packed anew);
- unquantised experts keep their old kernel, because they are packed at the first load only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "spark_in_process"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: both sides share the process."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket of full, unsharded tensors under their HF names."""

    bucket: list[tuple[str, Tensor]] = field(default_factory=list)


class InProcessEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets into the running model between ``start_weight_update`` and ``finish_weight_update``."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        if current_platform.is_cpu():
            forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(update_info.bucket)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def repack_tied_head(model: Any) -> None:
    """Pack a tied LM head's weights anew, as vLLM does once after the first load."""
    head, embedding = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight:
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
