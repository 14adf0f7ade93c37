"""What the ranks of the group tests run: scripted responses, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spark_megatron.rollout.groups import sample_groups
from spark_megatron.rollout.scripted import ScriptedSampler
from spark_megatron.types import Group, Task, Verdict

RESPONSES = tuple(f"answer {i}" for i in range(50))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}",
    )


def check(groups: Sequence[Group]) -> list[Group]:
    """The reward of a response is its own number; any two checks of it agree."""
    return [
        replace(g, verdicts=tuple(Verdict("ok", float(r.text.split()[1]) / 50) for r in g.rollouts)) for g in groups
    ]


def scripted(tokenizer: PreTrainedTokenizerFast, responses: Sequence[str]) -> ScriptedSampler:
    return ScriptedSampler(model="", tokenizer=tokenizer, dtype="fp32", stop_tokens=[1], responses=responses)


def groups(tasks: Sequence[Task], counts: Sequence[int]) -> dict[int, list[Group]]:
    """The groups of the first tasks, for each of some numbers of tasks."""
    tokenizer = byte_tokenizer()
    sampler = scripted(tokenizer, RESPONSES)
    sampler.start_update()
    sampler.load([])
    sampler.finish_update(5)
    settings: dict[str, Any] = {"n": 4, "temperature": 1.0, "max_new_tokens": 8, "seed": (3, "solve")}
    return {count: sample_groups(sampler, tokenizer, tasks[:count], check, **settings) for count in counts}
