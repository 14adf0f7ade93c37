"""What every sampling backend offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from spark_megatron.architecture import Architecture
from spark_megatron.slices import Row
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
    False where responses, and so log-probs, do not come from the weights. A prompt and its longest response must fit
    into ``max_model_len`` tokens. While it samples, it calls ``runtime.alive`` as often as there is progress.
    ``cache_block`` is the number of prompt tokens that are kept together for later requests; 0 if nothing is kept.

    An update is ``start_update``, then ``load`` for all parameters, then ``finish_update``. ``rows`` describes what a
    sampler of ``tensor_parallel`` ranks wants; ``load`` gets whole modules of it, this rank's shards by name, valid
    during the call alone. ``differing`` compares such shards with what is in use: for each parameter that is not
    exactly equal, where it is not, bool [first dimension]. ``sleep`` gives memory back until ``wake`` (first "weights",
    then "kv_cache"); a sampler that loses its weights by it has version -1 again.
    """

    has_model: bool
    weight_version: int
    replica: int
    replicas: int
    tensor_parallel: int
    max_model_len: int
    cache_block: int

    def rows(self, model: Architecture) -> list[Row]: ...

    def generate(self, requests: Sequence[Request]) -> list[tuple[Rollout, ...]]: ...

    def start_update(self) -> None: ...

    def load(self, tensors: Mapping[str, Tensor]) -> None: ...

    def finish_update(self, version: int) -> None: ...

    def differing(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def sleep(self) -> None: ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None: ...

    def close(self) -> None: ...
