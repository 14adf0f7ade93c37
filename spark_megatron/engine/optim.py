"""megatron-core's data parallelism, distributed AdamW and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True)
class OptimSettings:
    """AdamW and its schedule. The schedule counts optimiser updates of every kind, not steps of the loop."""

    lr: float
    min_lr: float
    decay: Literal["constant", "linear", "cosine"]
    decay_updates: int
    warmup_updates: int
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float


def data_parallel(model: torch.nn.Module, config: Any) -> DistributedDataParallel:
    """The model with megatron-core's gradient buffers; gradients accumulate and reduce in fp32."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, ddp_config, model)


def optimizer(ddp: DistributedDataParallel, settings: OptimSettings, dtype: torch.dtype) -> Any:
    """megatron-core's distributed optimizer (AdamW); fp32 master weights where the model is bf16."""
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
        [ddp],
    )


def lr_schedule(optim: Any, settings: OptimSettings) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optim,
        init_lr=0.0 if settings.warmup_updates else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_updates,
        lr_decay_steps=max(settings.decay_updates, settings.warmup_updates + 1),
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
