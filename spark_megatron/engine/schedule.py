"""Running micro-batches through megatron-core's forward and backward schedules, whatever the pipeline depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from spark_megatron.engine.local import Local

OnOutput = Callable[[Local, Tensor], Any]
"""What the last pipeline stage does with (micro-batch, hidden states [tokens, 1, hidden size])."""


def _run(chunks: Sequence[Any], batches: Sequence[Local], forward_only: bool, on_output: OnOutput) -> list[Any]:
    def forward_step(iterator: Iterator[Local], chunk: Any) -> tuple[Tensor, Any]:
        local = next(iterator)
        hidden = chunk(local.batch.tokens[None], None, None, packed_seq_params=local.packed)
        # megatron-core passes non_loss_data=True in forward-only runs; the micro-batch tells the two apart already.
        return hidden, lambda output, **_: on_output(local, output)

    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if several else iter(batches),
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(batches),
        # Of no effect but in interleaved pipelines, where all micro-batches are of this size.
        seq_length=int(batches[0].packed.cu_seqlens_q[-1]),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def forward(chunks: Sequence[Any], batches: Sequence[Local], on_output: OnOutput) -> list[Any]:
    """Results of ``on_output`` per micro-batch on the last stage, [] on the others."""
    return _run(chunks, batches, True, on_output)


def forward_backward(
    chunks: Sequence[Any],
    data_ranks: int,
    batches: Sequence[Local],
    loss: Callable[[Local, Tensor], tuple[Tensor, dict[str, Tensor]]],
) -> list[dict[str, Tensor]]:
    """Accumulate the gradient of the plain sum of all micro-batches' losses over all data and context ranks.

    megatron-core divides a loss by the number of micro-batches, multiplies it by the context-parallel degree, and
    averages gradients over data and context ranks; what is left of these factors is undone here, once, so that the
    weights in the batches alone decide what a token counts.

    Returns the statistics of each micro-batch on the last stage, [] on the others.
    """
    scale = len(batches) * data_ranks

    def scaled(batch: Local, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, stats = loss(batch, hidden)
        return value * scale, stats

    return _run(chunks, batches, False, scaled)
