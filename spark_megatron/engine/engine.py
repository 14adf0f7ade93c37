"""The training engine: one object that holds this rank's part of the model and updates it.

It knows tensors and parallelism. It knows nothing of prompts, rewards, objectives or the sampler.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from spark_megatron.engine import model as models
from spark_megatron.engine import optim, schedule
from spark_megatron.engine.logprobs import vocab_parallel_logprobs
from spark_megatron.engine.parallel import Parallel
from spark_megatron.engine.weights.stream import Bucket, Placement, export_hf, load_hf, save_hf
from spark_megatron.engine.weights.table import table
from spark_megatron.runtime import combine, gather
from spark_megatron.types import Batch

Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]
"""(log-probs, entropies, micro-batch), all [rows, length] -> (scalar to minimise, detached sums to report)."""

Snapshot = dict[str, Tensor]
"""A copy of this rank's parameters, by megatron-core name."""


class Engine:
    """A decoder model on megatron-core with its optimizer.

    Args:
        directory: HF model directory to load.
        parallel: the process groups of this job.
        dtype: of parameters and activations; gradients and optimizer state are fp32.
        settings: optimizer and learning-rate schedule.
        bucket_bytes: size of the pieces in which weights are exported.
    """

    def __init__(
        self,
        directory: str | Path,
        parallel: Parallel,
        dtype: torch.dtype,
        settings: optim.OptimSettings,
        bucket_bytes: int,
    ) -> None:
        self.directory, self.parallel, self.bucket_bytes = Path(directory), parallel, bucket_bytes
        self.hf = models.read_config(directory)
        module = models.build(self.hf, parallel, dtype)
        self.placement = Placement(table(self.hf), module, parallel, self.hf.num_hidden_layers)
        load_hf(self.placement, directory)
        self.ddp = optim.data_parallel(module, module.config)
        self.optimizer = optim.optimizer(self.ddp, settings, dtype)
        self.lr_schedule = optim.lr_schedule(self.optimizer, settings)
        self.weight_version = 0

    def _logprobs(self, batch: Batch, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        group = self.parallel.tensor_group
        return vocab_parallel_logprobs(logits, batch.labels, group, self.hf.vocab_size, temperature)

    def logprobs(self, batches: Sequence[Batch], temperature: float) -> list[Tensor]:
        """Log-probs of the labels, [rows, length] per micro-batch, fp32, on every rank of the model-parallel group."""
        self.ddp.eval()
        outputs = schedule.forward(
            self.ddp, batches, lambda batch, logits: self._logprobs(batch, logits, temperature)[0]
        )
        if self.parallel.layout.pipeline == 1:
            return outputs
        results = outputs or [torch.empty(b.tokens.shape, device=b.tokens.device) for b in batches]
        for result in results:
            dist.broadcast(result, self.parallel.last_stage_rank(), group=self.parallel.pipeline_group)
        return results

    def update(self, batches: Sequence[Batch], loss: Loss, temperature: float) -> dict[str, float]:
        """One optimiser step on micro-batches whose weights are already global.

        Returns, on every rank, the sums that ``loss`` reported over all micro-batches and data ranks ("max_" keys: the
        maximum), plus "grad_norm" and "lr".

        Raises:
            FloatingPointError: the gradient norm is not finite; the weights are then not to be used.
        """
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        lr = self.optimizer.param_groups[0]["lr"]

        def from_logits(batch: Batch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return loss(*self._logprobs(batch, logits, temperature), batch)

        stats = schedule.forward_backward(self.ddp, self.parallel.layout.data, batches, from_logits)
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm}: lower optim.lr or look at the batch's weights")
        self.lr_schedule.step(1)
        self.weight_version += 1
        one_per_data_rank = [] if self.parallel.tensor_rank else stats
        sums = combine({key: float(value) for key, value in s.items()} for s in one_per_data_rank)
        return combine(gather(sums)) | {"grad_norm": float(grad_norm), "lr": lr}

    def snapshot(self) -> Snapshot:
        """A frozen copy of this rank's current parameters (for a reference policy)."""
        return {name: p.detach().clone() for name, p in self.ddp.module.named_parameters()}

    @contextlib.contextmanager
    def holding(self, snapshot: Snapshot) -> Iterator[None]:
        """Compute with the parameters of a snapshot; nothing is copied, the current ones come back on exit."""
        parameters = dict(self.ddp.module.named_parameters())
        current = {name: p.data for name, p in parameters.items()}
        try:
            for name, p in parameters.items():
                p.data = snapshot[name]
            yield
        finally:
            for name, p in parameters.items():
                p.data = current[name]

    def export(self) -> Iterator[Bucket]:
        """The current weights as full HF tensors, bucket by bucket, on every rank (a collective)."""
        return export_hf(self.placement, self.bucket_bytes)

    def save_hf(self, directory: str | Path) -> None:
        """Write a HF directory that transformers and vLLM load: weights, config and tokenizer. A collective."""
        target = Path(directory)
        if dist.get_rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
            for file in self.directory.iterdir():
                if file.is_file() and not file.name.startswith("model"):
                    shutil.copyfile(file, target / file.name)
        dist.barrier()
        save_hf(self.placement, target, self.bucket_bytes)
        dist.barrier()
