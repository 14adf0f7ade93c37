"""The CPU platform layer: what megatron-core needs in order to run without CUDA.

megatron-core names its device in literals (``device="cuda"``, ``torch.cuda.current_device()``, type names such as
``"torch.cuda.FloatTensor"``). On a machine without CUDA the patches below redirect exactly those call sites. Each patch
states its target, its reason and the megatron-core versions it was checked against; a target that no longer exists is
an error, not a silent no-op. Nothing is ever installed where CUDA is present.

The names ``torch`` *inside* the listed megatron-core modules are replaced, not torch itself, so that vLLM and
transformers in the same process see the real thing. The two exceptions are methods of ``torch.Tensor``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

CPU = torch.device("cpu")


def device() -> torch.device:
    """The device of this rank's parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def distributed_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


class _TorchOnCpu:
    """Stands in for the module ``torch``: the same, except that "cuda" means the CPU."""

    cuda = SimpleNamespace(
        current_device=lambda: CPU,
        current_stream=lambda *args: None,
        synchronize=lambda *args: None,
        empty_cache=lambda: None,
        is_available=lambda: False,
        is_current_stream_capturing=lambda: False,
        nvtx=SimpleNamespace(range_push=lambda *args: None, range_pop=lambda *args: None),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device=CPU if device is not None and "cuda" in str(device) else device, **kwargs)

    return create


_torch_on_cpu = _TorchOnCpu()
for _name in ("tensor", "zeros", "ones", "empty", "full"):
    setattr(_torch_on_cpu, _name, _on_cpu(getattr(torch, _name)))

_tensor_type = torch.Tensor.type


def _cuda_type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    answer = _tensor_type(self, *args, **kwargs)
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


@dataclass(frozen=True)
class Patch:
    """One redirection: ``target`` is "module:attribute", ``versions`` a specifier over megatron-core versions."""

    target: str
    replacement: Any
    reason: str
    versions: str = ">=0.16,<0.17"

    def _owner(self) -> tuple[Any, str]:
        module, _, path = self.target.partition(":")
        *parents, attribute = path.split(".")
        owner: Any = importlib.import_module(module)
        for name in parents:
            owner = getattr(owner, name)
        return owner, attribute

    def apply(self) -> None:
        """Install the patch; RuntimeError if megatron-core's version is outside ``versions`` or the target is gone."""
        installed = version("megatron-core")
        if installed not in SpecifierSet(self.versions):
            raise RuntimeError(
                f"the CPU patch of {self.target} is for megatron-core {self.versions}, but {installed} is installed: "
                f"install megatron-core {self.versions} or extend the patch list in spark_megatron/engine/platform.py"
            )
        owner, attribute = self._owner()
        if not hasattr(owner, attribute):
            raise RuntimeError(f"the target {self.target} of a CPU patch does not exist in megatron-core {installed}")
        setattr(owner, attribute, self.replacement)


def _module(name: str, reason: str) -> Patch:
    return Patch(f"megatron.core.{name}:torch", _torch_on_cpu, reason)


PATCHES: tuple[Patch, ...] = (
    _module("distributed.param_and_grad_buffer", "allocates the gradient buffer on current_device()"),
    _module("models.common.embeddings.rotary_pos_embedding", "moves inv_freq to current_device() at first use"),
    _module("optimizer.clip_grads", 'makes the norm\'s tensors with device="cuda"'),
    _module("optimizer.distrib_optimizer", "makes its buffers on current_device()"),
    _module("optimizer.optimizer", 'makes found_inf and the loss scale with device="cuda"'),
    _module("pipeline_parallel.p2p_communication", "receives activations and shapes into current_device()"),
    _module("pipeline_parallel.schedules", 'counts tokens with device="cuda"'),
    _module("tensor_parallel.layers", "embedding and gathered inputs on current_device()"),
    _module("tensor_parallel.mappings", "gathers and scatters into current_device()"),
    _module("utils", 'nvtx ranges; the l2 norm of parameters with device="cuda"'),
    Patch("torch:Tensor.type", _cuda_type_name, "the optimizers compare type names with torch.cuda.*Tensor"),
    Patch(
        "torch:Tensor.cuda",
        lambda self, *args, **kwargs: self,
        "tied embeddings under pipeline parallelism call weight.data.cuda()",
    ),
)

_installed = False


def install() -> None:
    """Make megatron-core usable on this machine: all patches without CUDA, none with it. Safe to call again."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    for patch in PATCHES:
        patch.apply()
    _installed = True
