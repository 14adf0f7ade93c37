"""From tasks to checked groups: encode, share out over the samplers of the job, sample, check, collect."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from spark_megatron.data.chat import encode_prompt
from spark_megatron.data.packing import deal
from spark_megatron.rollout.base import Request, Sampler
from spark_megatron.rollout.lengths import ResponseLengths
from spark_megatron.runtime import deadline, gather_after, say
from spark_megatron.types import Group, Metrics, Task

Check = Callable[[Sequence[Group]], list[Group]]
"""Fills in the verdicts of groups."""


@dataclass(frozen=True)
class Phase:
    """What one phase of sampling gave: the checked groups of its tasks, in order.

    The group of a task whose prompt leaves no room for a response has no rollouts.
    """

    groups: list[Group]
    tokens: tuple[int, ...]
    """Generated tokens per sampler of the job."""

    @property
    def sampled(self) -> list[Group]:
        """The groups with rollouts."""
        return [group for group in self.groups if group.rollouts]


def phase_metrics(phases: Sequence[Phase]) -> Metrics:
    """How evenly the samplers were busy, and how many tasks had no room for a response.

    "rollout/imbalance" is the busiest sampler's generated tokens over the mean (1.0: even), of the most uneven phase.
    """
    if not phases:
        return {}
    uneven = [max(p.tokens) * len(p.tokens) / sum(p.tokens) if sum(p.tokens) else 1.0 for p in phases]
    too_long = sum(len(p.groups) - len(p.sampled) for p in phases)
    return {"rollout/imbalance": max(uneven), "rollout/too_long": float(too_long)}


def request_seed(*parts: object) -> int:
    """A 48-bit seed from anything printable: equal parts give equal seeds, on every machine.

    Seeds of different parts are far apart, so that the seeds seed..seed+n-1 of one request's samples never meet
    another's.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def sample_groups(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    check: Check,
    lengths: ResponseLengths,
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: tuple[object, ...],
    timeout_s: float,
) -> Phase:
    """The checked groups of ``tasks``, on every rank. A collective: all ranks pass the same arguments.

    Tasks are dealt to the samplers of the job by what they are expected to cost, so that none has much more to do than
    the others. The samples of a task depend on ``seed`` and on the task's position, never on the number of samplers.
    A sampler that makes no progress for ``timeout_s`` ends its process.

    Raises:
        RuntimeError: no original task of the phase leaves room for a response, or a rank did not deliver.
    """
    prompts = [encode_prompt(tokenizer, task) for task in tasks]
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) + max_new_tokens <= sampler.max_model_len]
    if tasks and not fitting:
        _nothing_fits(tasks, min(map(len, prompts)), max_new_tokens, sampler.max_model_len)
    costs = [len(prompts[i]) + n * lengths.expected(tasks[i].kind, max_new_tokens) for i in fitting]
    mine = [fitting[row] for row in deal(costs, sampler.replicas)[sampler.replica]]
    requests = [Request(prompts[i], n, temperature, max_new_tokens, request_seed(*seed, i)) for i in mine]
    with deadline(timeout_s, "sampling"):
        responses = sampler.generate(requests) if requests else []
    checked = check([Group(tasks[i], prompts[i], r) for i, r in zip(mine, responses, strict=True)])
    found = {i: (group.rollouts, group.verdicts) for i, group in zip(mine, checked, strict=True)}
    # Ranks of one sampler hold the same groups; the last one wins.
    parts = dict(gather_after("sampling", (sampler.replica, found)))
    collected = {i: responses for part in parts.values() for i, responses in part.items()}
    groups = [Group(task, prompts[i], *collected.get(i, ((), ()))) for i, task in enumerate(tasks)]
    lengths.observe(groups)
    tokens = [sum(len(r.tokens) for rollouts, _ in part.values() for r in rollouts) for part in parts.values()]
    return Phase(groups, tuple(tokens))


def _nothing_fits(tasks: Sequence[Task], shortest: int, max_new_tokens: int, max_model_len: int) -> None:
    """Refuse to go on where original tasks are concerned; recycled ones are not worth the end of a run."""
    told = (
        f"rollout.backend.max_model_len={max_model_len}: none of the {len(tasks)} prompts of this phase leaves room "
        f"for max_new_tokens={max_new_tokens}, the shortest has {shortest} tokens: raise it to "
        f"{shortest + max_new_tokens} or more"
    )
    if any(not task.source for task in tasks):
        raise RuntimeError(told)
    say(f"{told}; the phase is left out")
