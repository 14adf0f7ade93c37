"""Control tokens of a chat inside of text that users or models wrote."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def without_control(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """``text`` in which nothing is read as a special token: a space follows the first character of each, "< |end|>".

    One of a single character becomes a space. Without this, a question or a shown answer with "<|im_end|>" in it could
    end its turn and begin another one's.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special.update(tokenizer.all_special_tokens)
    spelled = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True) if token)
    if not spelled:
        return text
    before = None
    while text != before:  # taking one apart may leave another one: "<<s>s>"
        text, before = re.sub(spelled, lambda m: f"{m[0][0]} {m[0][1:]}" if m[0][1:] else " ", text), text
    return text
