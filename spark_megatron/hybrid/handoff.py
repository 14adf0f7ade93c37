"""Handing the trainer's weights to the sampler, and proving that they arrived."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spark_megatron.data.packing import pack
from spark_megatron.engine import platform
from spark_megatron.engine.engine import Engine
from spark_megatron.rollout.base import Request, Sampler
from spark_megatron.runtime import gather
from spark_megatron.types import Sample


class HandoffError(RuntimeError):
    """The sampler does not compute what the trainer computes, or samples of other weights were offered to it."""


@dataclass(frozen=True)
class Probe:
    """A small batch of fixed prompts on which trainer and sampler must agree.

    ``bound`` is the largest accepted difference of a token's log-prob, in nats: rounding in fp32 gives about 1e-5, in
    bf16 a few tenths on rare tokens; a wrong slice or a stale layer gives far more.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    bound: float


class Hybrid:
    """Owns the moment at which weights change hands between ``engine`` and ``sampler``."""

    def __init__(self, engine: Engine, sampler: Sampler, probe: Probe) -> None:
        self.engine, self.sampler, self.probe = engine, sampler, probe
        self.last_error = float("nan")
        """Largest log-prob difference of the last probe, in nats."""

    @contextlib.contextmanager
    def generating(self) -> Iterator[Sampler]:
        """The sampler, holding the trainer's current weights; handed over first where it holds others."""
        self.synchronise()
        yield self.sampler

    def synchronise(self) -> None:
        """Hand the weights over unless the sampler has them already. A collective."""
        if self.sampler.weight_version != self.engine.weight_version:
            self.hand_over()

    def hand_over(self) -> None:
        """Stream all weights into the sampler bucket by bucket, then compare both sides on the probe. A collective.

        A sampler without a model has nothing to compare.

        Raises:
            HandoffError: a log-prob differs by more than the probe's bound.
        """
        self.sampler.start_update()
        for bucket in self.engine.export():
            self.sampler.load(bucket)
        self.sampler.finish_update(self.engine.weight_version)
        if not self.sampler.has_model:
            return
        self.last_error = self.probe_error()
        if not self.last_error <= self.probe.bound:
            self.sampler.weight_version = -1  # what it holds is not the trainer's: nobody may sample with it
            raise HandoffError(
                f"after the hand-over of weights {self.engine.weight_version} a log-prob of the sampler differs from "
                f"the trainer's by {self.last_error:.2e} nats, and rollout.max_logprob_error={self.probe.bound}: one "
                "of them computes with other weights"
            )

    def probe_error(self) -> float:
        """Largest difference between sampler and trainer log-probs of the sampler's own tokens, over all replicas."""
        requests = [Request(p, 1, 1.0, self.probe.new_tokens, seed=i) for i, p in enumerate(self.probe.prompts)]
        rollouts = [r for part in gather([group[0] for group in self.sampler.generate(requests)]) for r in part]
        prompts = self.probe.prompts * (len(rollouts) // len(self.probe.prompts))
        rows = [
            Sample(p, r.tokens, "probe", rollout_logprobs=r.logprobs) for p, r in zip(prompts, rollouts, strict=True)
        ]
        tokens = sum(len(row.prompt) + len(row.response) for row in rows)
        batch = pack(rows, {"probe": 1.0}, kl_count=tokens).to(platform.device())
        [ours] = self.engine.logprobs([batch], temperature=1.0)
        worst = (ours - batch.rollout_logprobs)[batch.trained].abs().max().item()
        # Unlike Python's, torch's maximum of anything with NaN is NaN.
        return torch.tensor(gather(worst)).max().item()
