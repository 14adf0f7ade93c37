"""A backend without a model: responses are a fixed function of prompt and seed, for tests and dry runs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from spark_megatron.architecture import Architecture
from spark_megatron.rollout.base import Request
from spark_megatron.slices import Row
from spark_megatron.types import Rollout


class ScriptedSampler:
    """Draws each response uniformly from ``responses`` with the request's seed: equal on every parallel layout.

    Responses are cut off at the request's limit. Log-probs are NaN, since no model gave them.
    """

    has_model = False
    tensor_parallel = 1
    cache_block = 0

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Any,
        dtype: str,
        stop_tokens: Sequence[int],
        responses: Sequence[str],
        max_model_len: int,
        read_weights: bool = False,
    ) -> None:
        del model, dtype, stop_tokens  # what every backend is given, and this one has no use for
        self.tokenizer, self.responses, self.max_model_len = tokenizer, list(responses), max_model_len
        self.weight_version = 0 if read_weights else -1
        self.replica, self.replicas = dist.get_rank(), dist.get_world_size()

    def generate(self, requests: Sequence[Request]) -> list[tuple[Rollout, ...]]:
        return [tuple(self._rollout(request, i) for i in range(request.n)) for request in requests]

    def _rollout(self, request: Request, index: int) -> Rollout:
        rng = random.Random(f"{request.seed + index}:{request.prompt}")
        text = rng.choice(self.responses)
        tokens = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        if len(tokens) <= request.max_new_tokens:
            return Rollout(tokens, (float("nan"),) * len(tokens), text, "stop", self.weight_version)
        tokens = tokens[: request.max_new_tokens]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Rollout(tokens, (float("nan"),) * len(tokens), text, "length", self.weight_version)

    def rows(self, model: Architecture) -> list[Row]:
        """It wants nothing."""
        return []

    def start_update(self) -> None: ...

    def load(self, tensors: Mapping[str, Tensor]) -> None: ...

    def finish_update(self, version: int) -> None:
        self.weight_version = version

    def differing(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def sleep(self) -> None: ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None: ...

    def close(self) -> None: ...
