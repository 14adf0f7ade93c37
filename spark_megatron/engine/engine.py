"""The training engine: one object that holds this rank's part of the model and updates it.

It knows tensors and parallelism. It knows nothing of prompts, rewards, objectives or the sampler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from spark_megatron.engine import model as models
from spark_megatron.engine import optim, platform, schedule
from spark_megatron.engine.heads import Head, ScoreHead, VocabularyHead
from spark_megatron.engine.local import Local, place
from spark_megatron.engine.modules import Decoder
from spark_megatron.engine.offload import Away, optimizer_state
from spark_megatron.engine.parallel import Parallel
from spark_megatron.engine.weights.placement import Placement
from spark_megatron.engine.weights.stream import Bucket, export_hf, load_hf, save_hf
from spark_megatron.runtime import combine, gather
from spark_megatron.types import Batch, Comparisons, Sequences

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(what the head reads: log-probs and entropies [tokens], or scores [sequences]; micro-batch) -> (scalar to minimise,
detached sums to report)."""

Memory = Literal["optimizer", "gradients", "parameters"]
"""The parts of the training state, in the order in which they are best released."""

Snapshot = dict[str, Tensor]
"""A copy of this rank's parameters, by chunk and megatron-core name."""


class Engine:
    """A decoder model on megatron-core with its optimizer: a language model, or a scorer of sequences.

    Args:
        directory: HF model directory to load.
        parallel: the process groups of this job.
        dtype: of parameters and activations; gradients and optimizer state are fp32.
        settings: optimizer and learning-rate schedule.
        bucket_bytes: size of the pieces in which weights are exported.
        logits_bytes: memory that the logits of one piece of a micro-batch may take.
        score_seed: None for the head that the directory has. A number puts a scalar head on a language model, drawn
            with this seed; a directory with a scalar head keeps its own.
    """

    def __init__(
        self,
        directory: str | Path,
        parallel: Parallel,
        dtype: torch.dtype,
        settings: optim.OptimSettings,
        *,
        bucket_bytes: int,
        logits_bytes: int,
        score_seed: int | None = None,
    ) -> None:
        self.directory, self.parallel, self.settings = Path(directory), parallel, settings
        self.bucket_bytes = bucket_bytes
        self.hf = models.read_config(directory, scalar=score_seed is not None)
        modules = models.build(self.hf, parallel, dtype)
        self.placement = Placement(self.hf, modules, parallel)
        load_hf(self.placement, directory, {} if score_seed is None else models.drawn_head(self.hf, score_seed))
        optim.freeze(self.placement, settings.frozen)
        self.chunks = optim.data_parallel(modules)
        self.optimizer = optim.optimizer(self.chunks, settings, dtype)
        self.lr_schedule = optim.lr_schedule(self.optimizer, settings)
        self.head: Head = (
            ScoreHead(modules[-1], parallel)
            if self.placement.model.scalar
            else VocabularyHead(modules[-1], parallel, self.hf.vocab_size, logits_bytes)
        )
        parameters = list(self._parameters().values())
        self._memory: dict[Memory, Away] = {
            "optimizer": Away(lambda: optimizer_state(self.optimizer, parameters), keep=True),
            "gradients": Away(self._gradients, keep=False),
            "parameters": Away(lambda: parameters, keep=True),
        }
        self.weight_version = 0
        self.skipped_updates = 0
        """Updates whose gradient was not finite, since the start of the run."""

    def _place(self, batches: Sequence[Sequences]) -> list[Local]:
        """This rank's part of each micro-batch, and as many empty ones as the layout needs.

        Expert parallelism exchanges tokens between data ranks within every micro-batch, so that all need the same
        number; interleaved pipelines need a multiple of their depth.
        """
        layout, count = self.parallel.layout, len(batches)
        if layout.expert > 1:
            most = torch.tensor(count, device=platform.device())
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.parallel.data_group)
            count = int(most)
        if layout.virtual > 1:
            count = -(-count // layout.pipeline) * layout.pipeline
        return place([*batches, *[batches[0].emptied()] * (count - len(batches))], self.parallel)

    def logprobs(self, batches: Sequence[Batch], temperature: float) -> list[Tensor]:
        """Log-probs of the labels, [tokens] per micro-batch, fp32, on every rank that shares the batches."""
        return self._values(batches, temperature)

    def scores(self, batches: Sequence[Comparisons]) -> list[Tensor]:
        """Scores (logits), [sequences] per micro-batch, fp32, on every rank that shares the batches."""
        return self._values(batches, temperature=1.0)

    def _values(self, batches: Sequence[Sequences], temperature: float) -> list[Tensor]:
        for chunk in self.chunks:
            chunk.eval()
        locals_ = self._place(batches)
        outputs = schedule.forward(self.chunks, locals_, lambda local, hidden: self.head(local, hidden, temperature)[0])
        if self.parallel.last_stage:
            results = [self.head.whole(local, x) for local, x in zip(locals_, outputs, strict=True)][: len(batches)]
        else:
            results = [torch.empty(self.head.size(b), device=b.tokens.device) for b in batches]
        if self.parallel.layout.pipeline > 1:
            for result in results:
                dist.broadcast(result, self.parallel.last_stage_rank(), group=self.parallel.pipeline_group)
        return results

    def update(self, batches: Sequence[Sequences], loss: Loss, temperature: float) -> dict[str, float]:
        """One optimiser step on micro-batches whose weights are already global.

        An update whose gradient is not finite leaves weights, optimizer and learning rate as they are.

        Returns, on every rank, the sums that ``loss`` reported over all micro-batches, data and context ranks ("max_"
        keys: the maximum), plus "grad_norm" (before clipping), "lr", and "skipped" (1 if nothing was updated).
        """
        stats = self.accumulate(batches, loss, temperature)
        lr = self.optimizer.param_groups[0]["lr"]
        with self.optimizer_state():
            updated, grad_norm = optim.apply_gradients(self.optimizer, self.settings.clip_grad)
        if updated:
            self.lr_schedule.step(1)
            self.weight_version += 1
        else:
            self.skipped_updates += 1
        return stats | {"grad_norm": grad_norm, "lr": lr, "skipped": float(not updated)}

    def optimizer_state(self) -> contextlib.AbstractContextManager[None]:
        """The optimizer's state on the device: hold this wherever it is read or written."""
        return self._memory["optimizer"].present() if self.settings.offload else contextlib.nullcontext()

    def accumulate(self, batches: Sequence[Sequences], loss: Loss, temperature: float) -> dict[str, float]:
        """Fill the gradient buffers with the gradient of the loss over all ranks; the statistics of ``update``."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def from_hidden(local: Local, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return loss(*self.head(local, hidden, temperature), local.batch)

        stats = schedule.forward_backward(self.chunks, self.parallel.data, self._place(batches), from_hidden)
        told_already = self.parallel.tensor_rank > 0 or (self.head.shared and self.parallel.context_rank > 0)
        sums = combine({key: float(value) for key, value in s.items()} for s in ([] if told_already else stats))
        return combine(gather(sums))

    def release(self, what: Memory) -> int:
        """Give back the device memory of a part of the training state until ``restore``; the number of bytes freed.

        Without a GPU the host is the device: gradients are dropped, there is nowhere else to keep the rest.
        """
        if what != "gradients" and platform.device().type == "cpu":
            return 0
        return self._memory[what].send()

    def restore(self) -> None:
        """Everything that was released is back, but for the values of gradients."""
        for what, memory in self._memory.items():
            if not (what == "optimizer" and self.settings.offload):
                memory.fetch()

    def _gradients(self) -> list[Tensor]:
        buffers = [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return [buffer.grad_data for buffer in buffers]

    @property
    def modules(self) -> list[Decoder]:
        """This rank's parts of the model, one per virtual pipeline stage."""
        return [chunk.module for chunk in self.chunks]

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {f"{i}.{name}": p for i, module in enumerate(self.modules) for name, p in module.named_parameters()}

    def snapshot(self) -> Snapshot:
        """A frozen copy of this rank's current parameters (for a reference policy)."""
        return {name: p.detach().clone() for name, p in self._parameters().items()}

    @contextlib.contextmanager
    def holding(self, snapshot: Snapshot) -> Iterator[None]:
        """Compute with the parameters of a snapshot; nothing is copied, the current ones come back on exit."""
        parameters = self._parameters()
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
        save_hf(self.placement, self.directory, Path(directory), self.bucket_bytes)
