"""Prompts as a model gets them: templates, special tokens, and lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spark_megatron.data.chat import encode_prompt, encode_response
from spark_megatron.data.limit import PromptLimit
from spark_megatron.data.packing import pack
from spark_megatron.data.samples import to_samples
from spark_megatron.types import Group, Rollout, Task, Verdict

WORDS = ["<unk>", "<s>", "</s>", "<end>", "<user>", "<assistant>", "<system>", *(f"w{i}" for i in range(20))]
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
TASK = Task("t1", "solve", "w1 w2 w3", "8", "math", "w1 w2 w3")


def tokenizer(template: str = TEMPLATE, **tokens: Any) -> PreTrainedTokenizerFast:
    """One that puts a beginning of sequence before all that it encodes, as those of Llama do."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", **tokens}
    special = ["<end>", "<user>", "<assistant>", "<system>"]
    made = PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=special, **named)
    made.chat_template = template
    return made


def words(ids: tuple[int, ...]) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_exactly_one_beginning_of_sequence_and_the_generation_prompt() -> None:
    made = tokenizer()
    assert made.encode("w1")[0] == 1  # it would add another one to a text
    assert words(encode_prompt(made, TASK)) == "<s> <user> w1 w2 w3 <end> <assistant>"


def test_a_template_with_two_beginnings_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with two beginning-of-sequence tokens"):
        encode_prompt(tokenizer("<s> " + TEMPLATE), TASK)


def test_a_beginning_that_also_begins_every_turn_is_left_alone() -> None:
    made = tokenizer(TEMPLATE.removeprefix("{{ bos_token }} "), bos_token="<user>")
    two = replace(TASK, context=(("user", "w5"), ("assistant", "w6")))
    assert words(encode_prompt(made, two)) == "<user> w5 <end> <assistant> w6 <end> <user> w1 w2 w3 <end> <assistant>"


def test_context_comes_first() -> None:
    task = replace(TASK, context=(("system", "w9"), ("user", "w5"), ("assistant", "w6")))
    assert words(encode_prompt(tokenizer(), task)) == (
        "<s> <system> w9 <end> <user> w5 <end> <assistant> w6 <end> <user> w1 w2 w3 <end> <assistant>"
    )


def test_a_template_that_refuses_a_role_says_so() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    with pytest.raises(ValueError, match=r"refuses the turns \['system', 'user'\] of task t1: no system role"):
        encode_prompt(tokenizer(strict), replace(TASK, context=(("system", "w9"),)))
    assert encode_prompt(tokenizer(strict), TASK)


@pytest.mark.parametrize("tokens", [{}, {"pad_token": "</s>"}, {"pad_token": "<unk>"}])
def test_padding_plays_no_part(tokens: dict[str, str]) -> None:
    """Without a pad token, or with one that is the end of sequence: end tokens that were sampled are learned."""
    made = tokenizer(**tokens)
    prompt = encode_prompt(made, replace(TASK, context=(("assistant", "w4"),)))
    end, inner = made.eos_token_id, encode_response(made, "w7")
    rollouts = (
        Rollout((*inner[:-1], end), (-0.1,) * 2, "w7", "stop", 0),
        Rollout((7, end, 8, end), (-0.1,) * 4, "w0 </s> w1", "stop", 0),
    )
    group = Group(TASK, prompt, rollouts, (Verdict("ok", 1.0), Verdict("ok", 0.0)))
    samples = to_samples([group], [(1.0, -1.0)], {"solve": "policy"})
    batch = pack(samples, {"policy": 0.5}, 6)
    trained = batch.labels[batch.trained].tolist()
    assert trained == [*rollouts[0].tokens, *rollouts[1].tokens]  # nothing of the prompt, no end left out
    assert len(batch.tokens) == 2 * len(prompt) + 6


def test_long_prompts_are_dropped_or_cut() -> None:
    made = tokenizer()
    length = len(encode_prompt(made, TASK))
    for overlong in ("drop", "cut"):
        assert PromptLimit(made, length, overlong)(TASK) is TASK  # type: ignore[arg-type]
    assert PromptLimit(made, length - 1, "drop")(TASK) is None
    cut = PromptLimit(made, length - 2, "cut")(TASK)
    assert cut == replace(TASK, prompt="w3")
    assert cut is not None
    assert len(encode_prompt(made, cut)) == length - 2
    assert PromptLimit(made, length - 3, "cut")(TASK) is None  # nothing of the question would be left
