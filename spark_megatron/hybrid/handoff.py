"""The device belongs to the trainer or to the sampler: handing it over with the weights, and proof that they arrived.

Both live on every rank and take turns. ``Hybrid.generating`` and ``Hybrid.training`` own the order in which memory is
given back and taken and in which the weights go from one to the other; the training loop only says whose turn it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from spark_megatron.engine.engine import Engine, Memory
from spark_megatron.hybrid import proof
from spark_megatron.hybrid.plan import Sides
from spark_megatron.hybrid.proof import Probe
from spark_megatron.hybrid.transfer import Transfer
from spark_megatron.rollout.base import Sampler
from spark_megatron.runtime import alive, deadline, local_world_size, world_size
from spark_megatron.types import Metrics


class HandoffError(RuntimeError):
    """The sampler does not compute what the trainer computes, or samples of other weights were offered to it."""


class Hybrid:
    """One training engine and one sampler that share the device.

    Args:
        release: the parts of the training state whose memory the sampler gets.
        timeout_s: a hand-over that makes no progress for so long ends its process.
    """

    def __init__(
        self, engine: Engine, sampler: Sampler, probe: Probe, release: Sequence[Memory], timeout_s: float
    ) -> None:
        self.engine, self.sampler, self.probe, self.release = engine, sampler, probe, release
        self.timeout_s = timeout_s
        rows = sampler.rows(engine.placement.model)
        local = engine.placement.local
        sides = Sides(
            engine.placement.model,
            engine.parallel.layout,
            engine.placement.rows,
            sampler.tensor_parallel,
            rows,
            world=world_size(),
            node=local_world_size(),
            itemsize=next(iter(local.values())).element_size(),
        )
        self.transfer = Transfer(sides, local, engine.bucket_bytes)
        self.hand_overs = 0
        self.turns: list[Metrics] = []
        """What the sampler's turns took, each up to the trainer's next: seconds by phase, bytes received and released,
        the largest log-prob difference. Whoever reads it clears it."""
        self.last: Metrics = {}
        """The last of them."""
        self._training = True

    @contextlib.contextmanager
    def generating(self) -> Iterator[Sampler]:
        """The sampler's turn: it holds the trainer's current weights. A collective.

        Raises:
            HandoffError: its log-probs or its tensors are not the trainer's.
        """
        with deadline(self.timeout_s, "the hand-over"):
            if self._training:
                self.last = {"released_bytes": 0.0}
                self.turns.append(self.last)
                self._release("optimizer", "gradients")
                with self._phase("wake_weights"):
                    self.sampler.wake("weights")
            moved = self.sampler.weight_version != self.engine.weight_version
            if moved:
                self._move_weights()
            if self._training:
                with self._phase("wake_cache"):
                    self.sampler.wake("kv_cache")
            if moved:
                self._prove()
            if self._training:
                self._release("parameters")
        self._training = False
        yield self.sampler

    @contextlib.contextmanager
    def training(self) -> Iterator[Engine]:
        """The trainer's turn: its state is on the device."""
        if not self._training:
            with self._phase("sleep"):
                self.sampler.sleep()
            with self._phase("restore"):
                self.engine.restore()
        self._training = True
        yield self.engine

    def _release(self, *parts: Memory) -> None:
        with self._phase("release"):
            for part in parts:
                if part in self.release:
                    self.last["released_bytes"] += self.engine.release(part)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        alive()
        start = time.perf_counter()
        yield
        self.last[f"{name}_s"] = self.last.get(f"{name}_s", 0.0) + time.perf_counter() - start

    def _move_weights(self) -> None:
        """Module by module into the sampler. "install_s" is what the sampler does with them: repacking above all."""
        self.last["install_s"] = 0.0
        with self._phase("handoff"):
            with self._phase("install"):
                self.sampler.start_update()
            for tensors in self.transfer.run():
                with self._phase("install"):
                    self.sampler.load(tensors)
            with self._phase("install"):
                self.sampler.finish_update(self.engine.weight_version)
        self.last["received_bytes"] = float(self.transfer.bytes)
        self.hand_overs += 1

    def _prove(self) -> None:
        """Compare log-probs and tensors where they are due. A sampler without a model has nothing to compare."""
        if not self.sampler.has_model:
            return
        probe, number = self.probe, self.hand_overs - 1
        wrong = proof.Answer(0.0, 0)
        with self._phase("proof"):
            if number % probe.every == 0:
                wrong = proof.ask(probe, self.engine, self.sampler)
                self.last["probe_max_abs"] = wrong.error
            off = not wrong.error <= probe.bound or wrong.stale_tokens > 0
            due = number == 0 or (probe.compare_every > 0 and number % probe.compare_every == 0)
            tensors = proof.differing(self.engine, self.sampler) if due or off else []
        if off or tensors:
            version = self.sampler.weight_version
            self.sampler.weight_version = -1  # what it holds is not the trainer's: nobody may sample with it
            raise HandoffError(_complaint(version, wrong, probe.bound, tensors))


def _complaint(version: int, answer: proof.Answer, bound: float, tensors: Sequence[str]) -> str:
    told = f"after the hand-over of weights {version} "
    if not answer.error <= bound:
        told += (
            f"a log-prob of the sampler differs from the trainer's by {answer.error:.2e} nats, and "
            f"rollout.max_logprob_error={bound}: "
        )
    if tensors:
        more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
        return f"{told}the sampler computes with other values of {', '.join(tensors[:_SHOWN])}{more}"
    if answer.stale_tokens:
        return (
            f"{told}the sampler took keys and values of {answer.stale_tokens} prompt tokens from its prefix cache, "
            "which belong to the weights before"
        )
    return f"{told}all tensors are equal: the two compute differently, or the bound is too low for their precision"


_SHOWN = 6
"""Tensors that a message names."""
