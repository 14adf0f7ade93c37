"""Prompts that are too long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from spark_megatron.data.chat import encode_prompt
from spark_megatron.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptLimit:
    """Keeps prompts, as they are encoded for the model, to ``max_tokens``.

    ``overlong`` "drop" leaves a longer one out; "cut" takes away from the beginning of the user's turn, whose end is
    where the question tends to stand.
    """

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    overlong: Literal["drop", "cut"]

    def __call__(self, task: Task) -> Task | None:
        """The task itself where it fits, a shorter one, or None where it is to be left out."""
        excess = len(encode_prompt(self.tokenizer, task)) - self.max_tokens
        if excess <= 0:
            return task
        ids = self.tokenizer.encode(task.prompt, add_special_tokens=False)
        while self.overlong == "cut" and excess > 0 and excess < len(ids):
            ids = ids[excess:]
            shorter = replace(task, prompt=self.tokenizer.decode(ids).lstrip())
            excess = len(encode_prompt(self.tokenizer, shorter)) - self.max_tokens
            if excess <= 0:
                return shorter
        return None
