"""What every sampling backend offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spark_megatron.types import Rollout


@dataclass(frozen=True)
class Request:
    """One prompt to continue ``n`` times. Continuation i is drawn with seed ``seed + i``; temperature 0 is greedy."""

    prompt: tuple[int, ...]
    n: int
    temperature: float
    max_new_tokens: int
    seed: int


class Sampler(Protocol):
    """A sampling backend. Ranks of one ``replica`` must call it together with the same arguments.

    ``weight_version`` is the version of the weights that it samples with; -1 before any were loaded. ``has_model`` is
    False where responses, and so log-probs, do not come from the weights.
    """

    has_model: bool
    weight_version: int
    replica: int
    replicas: int

    def generate(self, requests: Sequence[Request]) -> list[tuple[Rollout, ...]]: ...

    def start_update(self) -> None: ...

    def load(self, bucket: list[tuple[str, Tensor]]) -> None: ...

    def finish_update(self, version: int) -> None: ...

    def close(self) -> None: ...
