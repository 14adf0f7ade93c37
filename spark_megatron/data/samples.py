"""From scored groups, or from texts, to sequences to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spark_megatron.data.chat import encode_prompt, encode_response
from spark_megatron.types import Component, Group, Sample, Task, TaskKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def to_samples(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float | None]],
    component_of: Mapping[TaskKind, Component],
) -> list[Sample]:
    """One sample per rollout, in order, with its advantage: ``advantages[g][i]`` belongs to rollout i of group g.

    Left out are masked rollouts (advantage None), empty ones, and whole groups whose advantages are all zero or
    masked: they carry no signal.
    """
    samples = []
    for group, values in zip(groups, advantages, strict=True):
        if len(values) != len(group.rollouts):
            raise ValueError(f"task {group.task.id}: {len(group.rollouts)} rollouts but {len(values)} advantages")
        if not any(values):
            continue
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            if advantage is None or not rollout.tokens:
                continue
            samples.append(
                Sample(
                    prompt=group.prompt_tokens,
                    response=rollout.tokens,
                    component=component_of[group.task.kind],
                    advantage=advantage,
                    rollout_logprobs=rollout.logprobs,
                    weight_version=rollout.weight_version,
                )
            )
    return samples


def supervised_samples(
    pairs: Sequence[tuple[Task, str]],
    tokenizer: PreTrainedTokenizerBase,
    component_of: Mapping[TaskKind, Component],
) -> list[Sample]:
    """One sample per (task, target response), to be learned by cross-entropy."""
    return [
        Sample(
            prompt=encode_prompt(tokenizer, task),
            response=encode_response(tokenizer, text),
            component=component_of[task.kind],
            loss="cross_entropy",
        )
        for task, text in pairs
    ]
