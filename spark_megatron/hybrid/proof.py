"""Proof that a sampler computes with the trainer's weights, and a search for what is wrong where it does not.

The probe compares log-probs, which needs no knowledge of how weights travel. The comparison of tensors uses the export
to Hugging Face tensors, which shares no code with the plan of a hand-over: what one gets wrong the other does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from spark_megatron.data.packing import pack
from spark_megatron.engine import platform
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.weights.stream import Bucket
from spark_megatron.rollout.base import Request, Sampler
from spark_megatron.runtime import gather
from spark_megatron.slices import Row
from spark_megatron.types import Sample


@dataclass(frozen=True)
class Probe:
    """A small batch of fixed prompts on which trainer and sampler must agree; of long ones the part that fits.

    ``bound`` is the largest accepted difference of a token's log-prob, in nats: rounding in fp32 gives about 1e-5, in
    bf16 a few tenths on rare tokens; a wrong slice or a stale layer gives far more. Log-probs are compared at the first
    hand-over and at every ``every``-th after it; all tensors at the first, at every ``compare_every``-th (0: no other),
    and whenever the log-probs differ.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    bound: float
    every: int
    compare_every: int


@dataclass(frozen=True)
class Answer:
    """``error`` is the largest difference of a log-prob, in nats. ``stale_tokens`` are prompt tokens whose keys and
    values the sampler still had from before: there must be none right after new weights came.
    """

    error: float
    stale_tokens: int


def ask(probe: Probe, engine: Engine, sampler: Sampler) -> Answer:
    """Sampler against trainer on the sampler's own tokens, over all replicas. A collective."""
    room = sampler.max_model_len - probe.new_tokens
    prompts = tuple(prompt[:room] for prompt in probe.prompts)
    longest = sampler.cache_block + 1
    if 1 < longest <= room:
        # A prompt that fills a block comes first: its keys and values would be found in a stale cache.
        repeated = prompts[0] * (longest // len(prompts[0]) + 1)
        prompts = (repeated[:longest], *prompts)
    requests = [Request(prompt, 1, 1.0, probe.new_tokens, seed=i) for i, prompt in enumerate(prompts)]
    rollouts = [r for part in gather([group[0] for group in sampler.generate(requests)]) for r in part]
    prompts = prompts * (len(rollouts) // len(prompts))
    rows = [Sample(p, r.tokens, "probe", rollout_logprobs=r.logprobs) for p, r in zip(prompts, rollouts, strict=True)]
    tokens = sum(len(row.prompt) + len(row.response) for row in rows)
    batch = pack(rows, {"probe": 1.0}, kl_count=tokens).to(platform.device())
    [ours] = engine.logprobs([batch], temperature=1.0)
    worst = (ours - batch.rollout_logprobs)[batch.trained].abs().max().item()
    # Unlike Python's, torch's maximum of anything with NaN is NaN.
    error = torch.tensor(gather(worst)).max().item()
    return Answer(error, max(r.cached_tokens for r in rollouts[:: len(requests)]))


def differing(engine: Engine, sampler: Sampler) -> list[str]:
    """The HF tensors that some sampler does not hold exactly as the trainer does, sorted. A collective."""
    rank = torch.distributed.get_rank() % sampler.tensor_parallel
    rows = sampler.rows(engine.placement.model)
    of_parameter: dict[str, list[Row]] = {}
    for row in rows:
        of_parameter.setdefault(row.full_name, []).append(row)
    found: set[str] = set()
    for shards in shards_of(engine.export(), rows, sampler.tensor_parallel, rank):
        for name, where in sampler.differing(shards).items():
            parts = (_spoiled(row, where, sampler.tensor_parallel, rank) for row in of_parameter.get(name, ()))
            found.update(chain.from_iterable(parts) if name in of_parameter else [name])
    return sorted(set().union(*gather(found)))


def _spoiled(row: Row, where: Tensor, degree: int, rank: int) -> list[str]:
    """The HF tensors of a row that have a part where its parameter differs: bool [first dimension]."""
    if row.expert is not None:
        return list(row.hf) if where[row.expert] else []
    if row.dim:
        return list(row.hf)
    return [row.hf[s.tensor] for offset, s in row.segments(degree, rank) if where[offset : offset + len(s)].any()]


def shards_of(buckets: Iterable[Bucket], rows: Sequence[Row], degree: int, rank: int) -> Iterator[dict[str, Tensor]]:
    """What rank ``rank`` of ``degree`` should hold of whole HF tensors, module by module as soon as it is complete."""
    rows_of = {name: row for row in rows for name in row.hf}
    waiting: dict[str, set[str]] = {}
    experts: dict[str, int] = {}
    for row in rows:
        waiting.setdefault(row.full_name.rpartition(".")[0], set()).update(row.hf)
        experts[row.full_name] = experts.get(row.full_name, 0) + (row.expert is not None)
    made: dict[str, dict[str, Tensor]] = {}
    for bucket in buckets:
        for name, tensor in bucket:
            row = rows_of[name]
            module = row.full_name.rpartition(".")[0]
            shape = row.shard_shape(degree)
            shape = (experts[row.full_name], *shape) if row.expert is not None else shape
            shard = made.setdefault(module, {}).setdefault(row.full_name, tensor.new_zeros(shape))
            into = shard if row.expert is None else shard[row.expert]
            for offset, segment in row.segments(degree, rank):
                if row.hf[segment.tensor] == name:
                    piece = tensor.narrow(row.dim, segment.start, len(segment))
                    into.narrow(row.dim, offset, len(segment)).copy_(piece)
            waiting[module].discard(name)
            if not waiting[module]:
                yield made.pop(module)
