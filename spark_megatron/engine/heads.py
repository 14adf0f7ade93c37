"""What the last pipeline stage makes of hidden states: the values that a loss is computed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from spark_megatron.engine.local import Local
from spark_megatron.engine.logprobs import linear_logprobs
from spark_megatron.engine.modules import Decoder
from spark_megatron.engine.parallel import Parallel
from spark_megatron.types import Sequences


class Head(Protocol):
    """Reads the hidden states [tokens (/ tp), 1, hidden size] of this rank's part of a micro-batch.

    ``shared`` says whether the context ranks have the same values, so that those of one of them are all there are.
    ``size`` is the number of values of a whole micro-batch, ``whole`` collects them (the first kind) on every context
    rank.
    """

    @property
    def shared(self) -> bool: ...

    def __call__(self, local: Local, hidden: Tensor, temperature: float) -> tuple[Tensor, ...]: ...

    def size(self, batch: Sequences) -> int: ...

    def whole(self, local: Local, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class VocabularyHead:
    """(log-probs of the labels, entropies), each [tokens of this rank], under logits divided by the temperature."""

    decoder: Decoder
    parallel: Parallel
    vocab_size: int
    logits_bytes: int
    shared: bool = False

    def __call__(self, local: Local, hidden: Tensor, temperature: float) -> tuple[Tensor, ...]:
        hidden = hidden.squeeze(1)
        if self.parallel.layout.sequence:
            hidden = gather_from_sequence_parallel_region(hidden)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return linear_logprobs(
            hidden,
            self.decoder.head(),
            local.batch.per_token()["labels"],
            group=self.parallel.tensor_group,
            vocab_size=self.vocab_size,
            temperature=temperature,
            logits_bytes=self.logits_bytes,
        )

    def size(self, batch: Sequences) -> int:
        return len(batch.tokens)

    def whole(self, local: Local, values: Tensor) -> Tensor:
        return local.gather(values, self.parallel.context_group)


@dataclass(frozen=True)
class ScoreHead:
    """(scores divided by the temperature,): [sequences of the whole micro-batch], fp32, on every context rank.

    The score of a sequence is read at its last token, which one context rank holds.
    """

    decoder: Decoder
    parallel: Parallel
    shared: bool = True

    def __call__(self, local: Local, hidden: Tensor, temperature: float) -> tuple[Tensor, ...]:
        hidden = hidden.squeeze(1)
        if self.parallel.layout.sequence:
            # Every tensor rank computes all scores, and so the whole gradient of each: none is to be summed.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        last = hidden[local.ends.clamp(min=0)].float()
        scores = torch.where(local.ends >= 0, last @ self.decoder.head()[0].float(), 0.0)
        if self.parallel.layout.context > 1:
            # Summed forwards, handed back as it is: a context rank answers for the scores of its own tokens.
            scores = reduce_from_tensor_model_parallel_region(scores, group=self.parallel.context_group)
        return (scores / temperature,)

    def size(self, batch: Sequences) -> int:
        return len(batch.cu_seqlens) - 1

    def whole(self, local: Local, values: Tensor) -> Tensor:
        return values
