"""Running micro-batches through megatron-core's forward and backward schedules, whatever the pipeline depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from spark_megatron.types import Batch

OnOutput = Callable[[Batch, Tensor], Any]
"""What the last pipeline stage does with (micro-batch, logits [rows, length, V / tp])."""


def _run(model: Any, batches: Sequence[Batch], forward_only: bool, on_output: OnOutput) -> list[Any]:
    def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        logits = model(batch.tokens, None, None)
        # megatron-core passes non_loss_data=True in forward-only runs; the batch tells the two apart already.
        return logits, lambda output, **_: on_output(batch, output)

    rows, length = batches[0].tokens.shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def forward(model: Any, batches: Sequence[Batch], on_output: OnOutput) -> list[Any]:
    """Results of ``on_output`` per micro-batch on the last stage, [] on the others."""
    return _run(model, batches, True, on_output)


def forward_backward(
    model: Any,
    data_ranks: int,
    batches: Sequence[Batch],
    loss: Callable[[Batch, Tensor], tuple[Tensor, dict[str, Tensor]]],
) -> list[dict[str, Tensor]]:
    """Accumulate the gradient of the plain sum of all micro-batches' losses over all data ranks.

    megatron-core divides a loss by the number of micro-batches and averages gradients over data ranks; both factors
    are undone here, once, so that the weights in the batches alone decide what a token counts.

    Returns the statistics of each micro-batch on the last stage, [] on the others.
    """
    scale = len(batches) * data_ranks

    def scaled(batch: Batch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, stats = loss(batch, logits)
        return value * scale, stats

    return _run(model, batches, False, scaled)
