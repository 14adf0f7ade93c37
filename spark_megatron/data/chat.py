"""From text to tokens, with the tokenizer's own chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from spark_megatron.data.control import without_control
from spark_megatron.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(tokenizer: PreTrainedTokenizerBase, task: Task) -> tuple[int, ...]:
    """The turns before the task's prompt and the prompt as the user's turn, up to where the assistant begins.

    The tokenizer renders and encodes in one call, so that a beginning-of-sequence token occurs only where the
    template puts it. Control tokens inside of the prompt are taken apart.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template: add one to its folder")
    turns = (*task.context, ("user", task.prompt))
    messages = [{"role": role, "content": without_control(text, tokenizer)} for role, text in turns]
    try:
        ids: Any = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        roles = [role for role, _ in turns]
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} refuses the turns {roles} of task {task.id}: {error}"
        ) from error
    begin = tokenizer.bos_token_id
    if begin is not None and list(ids[:2]) == [begin, begin]:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} begins with two beginning-of-sequence tokens: remove one"
        )
    return tuple(int(token) for token in ids)


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """``text`` as the assistant would have sampled it, with the end-of-sequence token last (exactly once).

    Control tokens before the end are taken apart: they were typed, not sampled.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token: set eos_token")
    plain = without_control(text.removesuffix(str(tokenizer.eos_token)), tokenizer)
    return (*(int(token) for token in tokenizer.encode(plain, add_special_tokens=False)), int(end))
