"""megatron-core's data parallelism, distributed AdamW and learning-rate schedule."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from spark_megatron.engine import adam
from spark_megatron.engine.modules import Decoder
from spark_megatron.engine.weights.placement import Placement


@dataclass(frozen=True)
class OptimSettings:
    """AdamW and its schedule. The schedule counts optimiser updates of every kind, not steps of the loop.

    ``decay`` "wsd" holds the rate after warm-up and lowers it, linearly, over the last ``wsd_updates`` of
    ``decay_updates``. ``frozen`` are patterns (``*`` matches anything) of HF tensor names that are not trained.
    ``offload`` keeps the optimizer's state in host memory between updates.
    """

    lr: float
    min_lr: float
    decay: Literal["constant", "linear", "cosine", "wsd"]
    decay_updates: int
    wsd_updates: int
    warmup_updates: int
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float
    frozen: tuple[str, ...]
    offload: bool


def freeze(placement: Placement, patterns: Sequence[str]) -> None:
    """Take the tensors that match out of training; ValueError for a pattern that matches none, or half a parameter."""
    for pattern in patterns:
        matched = False
        for row in placement.rows:
            hits = [name for name in row.hf if fnmatch.fnmatchcase(name, pattern)]
            if hits and len(hits) < len(row.hf):
                raise ValueError(
                    f"optim.frozen: {pattern} matches {hits[0]} but not all of {', '.join(row.hf)}, which are one "
                    "parameter: freeze all of them or none"
                )
            matched = matched or bool(hits)
            if hits and row.full_name in placement.local:
                placement.local[row.full_name].requires_grad_(False)
        if not matched:
            raise ValueError(f"optim.frozen: {pattern} matches no tensor; names are like {placement.rows[1].hf[0]}")


def data_parallel(chunks: Sequence[Decoder]) -> list[DistributedDataParallel]:
    """The model's chunks with megatron-core's gradient buffers; gradients accumulate and reduce in fp32."""
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    return [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]


def optimizer(chunks: Sequence[DistributedDataParallel], settings: OptimSettings, dtype: torch.dtype) -> Any:
    """megatron-core's distributed optimizer (AdamW); fp32 master weights where the model is bf16."""
    adam.install()
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        list(chunks),
    )


def apply_gradients(optim: Any, clip_grad: float) -> tuple[bool, float]:
    """One optimiser step on the reduced gradients, unless their norm (over all parameters) is not finite.

    Returns whether the weights were updated, and the norm before clipping.
    """
    optim.prepare_grads()
    norm = float(optim.get_grad_norm())
    if not math.isfinite(norm):
        return False, norm
    for part in optim.chained_optimizers:  # experts have an optimizer of their own
        clip_grad_by_total_norm_fp32(part.get_parameters(), clip_grad, norm)
    optim.step_with_ready_grads()
    return True, norm


def lr_schedule(optim: Any, settings: OptimSettings) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optim,
        init_lr=0.0 if settings.warmup_updates else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_updates,
        lr_decay_steps=max(settings.decay_updates, settings.warmup_updates + 1),
        lr_decay_style="WSD" if settings.decay == "wsd" else settings.decay,
        wsd_decay_steps=settings.wsd_updates,
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
