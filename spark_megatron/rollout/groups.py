"""From tasks to checked groups: encode, share out over the samplers of the job, sample, check, collect."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from spark_megatron.data.chat import encode_prompt
from spark_megatron.rollout.base import Request, Sampler
from spark_megatron.runtime import gather
from spark_megatron.types import Group, Task

Check = Callable[[Sequence[Group]], list[Group]]
"""Fills in the verdicts of groups."""


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
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: tuple[object, ...],
) -> list[Group]:
    """The checked groups of ``tasks``, in order, on every rank. A collective: all ranks pass the same arguments.

    Each sampler of the job takes every k-th task. The samples of a task depend on ``seed`` and on the task's position,
    never on the number of samplers.
    """
    mine = range(sampler.replica, len(tasks), sampler.replicas)
    prompts = {i: encode_prompt(tokenizer, tasks[i]) for i in mine}
    requests = [Request(prompts[i], n, temperature, max_new_tokens, request_seed(*seed, i)) for i in mine]
    responses = sampler.generate(requests) if requests else []
    groups = check([Group(tasks[i], prompts[i], r) for i, r in zip(mine, responses, strict=True)])
    # Ranks of one sampler hold the same groups; the last one wins.
    collected = {i: group for part in gather(dict(zip(mine, groups, strict=True))) for i, group in part.items()}
    return [replace(collected[i], task=tasks[i]) for i in range(len(tasks))]
