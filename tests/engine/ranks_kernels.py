"""What the ranks of a column-parallel layer compute from their rows of its weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from spark_megatron.engine import kernels, platform
from tests.engine.test_kernels import tensors


def on_slices() -> dict[Any, Any]:
    """{(dtype, kind): result, gradient of the input, gradient of the weight}, of this rank."""
    platform.install()
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    answers = {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        x, weight, grad = (t.detach() for t in tensors(dtype, (34, 1, 24), (40, 24), (34, 1, 40)))
        for kind in ("allreduce", "sequence"):
            sequence = kind == "sequence"
            part = (x.chunk(ranks)[rank] if sequence else x).clone().requires_grad_()
            rows = weight.chunk(ranks)[rank].clone().requires_grad_()
            out = kernels.linear(part, rows, None, False, not sequence, sequence, tp_group=group)
            out.backward(grad.chunk(ranks, -1)[rank])
            answers[name, kind] = {"out": out.detach(), "grad": part.grad, "weight_grad": rows.grad}
    return answers
