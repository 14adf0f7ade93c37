"""The CPU platform layer: what megatron-core needs in order to run without CUDA.

megatron-core names its device in literals (``device="cuda"``, ``torch.cuda.current_device()``, type names such as
``"torch.cuda.FloatTensor"``). On a machine without CUDA the patches below redirect exactly those call sites. Each patch
states its target, its reason and the megatron-core versions it is for: other versions do without it, and a version of
which nothing is known is refused. A target that no longer exists is an error, not a silent no-op. Nothing is ever
installed where CUDA is present.

The names ``torch`` *inside* the listed megatron-core modules are replaced, not torch itself, so that vLLM and
transformers in the same process see the real thing. The two exceptions are methods of ``torch.Tensor``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet

CPU = torch.device("cpu")

OLDEST, NEWEST = ">=0.16,<0.17", ">=0.19,<0.20"
"""The releases of megatron-core that are known: the last one for Python 3.11, and the newest."""


def device() -> torch.device:
    """The device of this rank's parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def distributed_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


@functools.cache
def has_fast_bf16() -> bool:
    """Whether matrix products in bf16 are at least as fast as in fp32 here."""
    return torch.cuda.is_available() or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """In which to multiply ``tensor``. Without instructions for bf16, fp32 is some ten times faster."""
    return torch.float32 if tensor.dtype == torch.bfloat16 and not has_fast_bf16() else tensor.dtype


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``, rounded once to their dtype."""
    return (a.to(product_dtype(a)) @ b.to(product_dtype(b))).to(a.dtype)


class _Stream:
    """A queue of work where there is only one: everything is done when it is asked for."""

    def __init__(self, *_args: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_args: object) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


class _TorchOnCpu:
    """Stands in for the module ``torch``: the same, except that "cuda" means the CPU."""

    cuda = SimpleNamespace(
        current_device=lambda: CPU,
        current_stream=_Stream,
        Stream=_Stream,
        stream=lambda stream: stream,
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


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """``all_gather`` of tensors whose first dimensions differ, for which gloo has none."""
    ranks, sizes = len(outputs), [len(output) for output in outputs]
    received = tensor.new_empty(sum(sizes), *tensor.shape[1:])
    dist.all_to_all_single(received, torch.cat([tensor] * ranks), sizes, [len(tensor)] * ranks, group=group)
    for output, part in zip(outputs, received.split(sizes), strict=True):
        output.copy_(part)


def _reduce_scatter(output: torch.Tensor, tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """``reduce_scatter`` of tensors whose first dimensions differ, for which gloo has none."""
    received = output.new_empty(len(tensors), *output.shape)
    sizes = [len(tensor) for tensor in tensors]
    dist.all_to_all_single(received.flatten(0, 1), torch.cat(tensors), [len(output)] * len(tensors), sizes, group=group)
    output.copy_(received.sum(0))


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, except in a group of one rank: there gloo copies gradients or parameters back and forth."""

    def call(output: torch.Tensor, tensor: torch.Tensor, *, group: dist.ProcessGroup, **options: Any) -> Any:
        if group.size() > 1:
            return collective(output, tensor, group=group, **options)
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        return None

    return call


class _DistributedOnGloo:
    """Stands in for ``torch.distributed``: the same, but with collectives of tensors that differ in size."""

    all_gather = staticmethod(_all_gather)
    reduce_scatter = staticmethod(_reduce_scatter)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class _TorchOnGloo(_TorchOnCpu):
    distributed = _DistributedOnGloo()


def _as_integers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """In place of ``maybe_move_tensor_to_cpu``: the same for a tensor that is there already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _router_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """In place of ``router_gating_linear``: logits of the experts in ``dtype``."""
    bias = None if bias is None else bias.to(dtype)
    return torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), bias)


_tensor_type = torch.Tensor.type


def _cuda_type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    answer = _tensor_type(self, *args, **kwargs)
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


@dataclass(frozen=True)
class Patch:
    """One redirection: ``target`` is "module:attribute", ``versions`` lists the megatron-core releases it is for."""

    target: str
    replacement: Any
    reason: str
    versions: tuple[str, ...] = (OLDEST, NEWEST)

    def apply(self) -> None:
        """Install the patch; RuntimeError if the target is gone."""
        module, _, path = self.target.partition(":")
        *parents, attribute = path.split(".")
        try:
            owner = functools.reduce(getattr, parents, importlib.import_module(module))
            getattr(owner, attribute)
        except (ModuleNotFoundError, AttributeError) as error:
            raise RuntimeError(
                f"the target {self.target} of a CPU patch does not exist in megatron-core {version('megatron-core')}: "
                "narrow the versions that the patch is for"
            ) from error
        setattr(owner, attribute, self.replacement)


def _module(name: str, reason: str) -> Patch:
    return Patch(f"megatron.core.{name}:torch", _torch_on_cpu, reason)


PATCHES: tuple[Patch, ...] = (
    _module("dist_checkpointing.strategies.async_utils", "counts the writers at work on current_device()"),
    _module("distributed.param_and_grad_buffer", "allocates the gradient buffer on current_device()"),
    Patch(
        "megatron.core.distributed.param_and_grad_buffer:dist_reduce_scatter_func",
        _unless_alone(dist.reduce_scatter_tensor),
        "reduces all gradients over a single data rank, too",
    ),
    Patch(
        "megatron.core.distributed.param_and_grad_buffer:dist_all_gather_func",
        _unless_alone(dist.all_gather_into_tensor),
        "gathers all parameters from a single data rank, too",
    ),
    _module("models.common.embeddings.rotary_pos_embedding", "moves inv_freq to current_device() at first use"),
    _module("optimizer.clip_grads", 'makes the norm\'s tensors with device="cuda"'),
    _module("optimizer.distrib_optimizer", "makes its buffers on current_device()"),
    _module("optimizer.optimizer", 'makes found_inf and the loss scale with device="cuda"'),
    _module("pipeline_parallel.p2p_communication", "receives activations and shapes into current_device()"),
    _module("pipeline_parallel.schedules", 'counts tokens with device="cuda"'),
    _module("tensor_parallel.layers", "embedding and gathered inputs on current_device()"),
    Patch(
        "megatron.core.tensor_parallel.mappings:torch",
        _TorchOnGloo(),
        "gathers and scatters into current_device(), and tokens of experts in uneven parts",
    ),
    _module("transformer.moe.router", "moves its weight to current_device() at every use"),
    _module("transformer.moe.token_dispatcher", "copies the counts of tokens on a CUDA stream of its own"),
    _module("utils", 'nvtx ranges; the l2 norm of parameters with device="cuda"'),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        _as_integers,
        "turns counts into the integers that all_to_all takes only if they come from a GPU",
    ),
    Patch(
        "megatron.core.transformer.moe.router:router_gating_linear",
        _router_logits,
        "asks for te_general_gemm, a name that is undefined without Transformer Engine",
        versions=(OLDEST,),
    ),
    Patch(
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        lambda self, name="": contextlib.nullcontext(),
        "exchanges the state of the CUDA generator, also around a dropout of 0",
    ),
    Patch("torch:Tensor.type", _cuda_type_name, "the optimizers compare type names with torch.cuda.*Tensor"),
    Patch(
        "torch:Tensor.cuda",
        lambda self, *args, **kwargs: self,
        "tied embeddings under pipeline parallelism call weight.data.cuda()",
    ),
)

_installed = False


def apply(patches: Iterable[Patch]) -> None:
    """Install those of ``patches`` that are for the installed megatron-core.

    Raises:
        RuntimeError: that version is unknown, or has not the target of a patch that is for it.
    """
    installed = version("megatron-core")
    known = [versions for versions in (OLDEST, NEWEST) if installed in SpecifierSet(versions)]
    if not known:
        raise RuntimeError(
            f"megatron-core {installed} is installed, but this project knows how to patch {OLDEST} and {NEWEST} only: "
            "install one of these, or extend the patches in spark_megatron/engine/platform.py"
        )
    for patch in patches:
        if known[0] in patch.versions:
            patch.apply()


def install() -> None:
    """Make megatron-core usable on this machine: all patches without CUDA, none with it. Safe to call again."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    apply(PATCHES)
    _installed = True
