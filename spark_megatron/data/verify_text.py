"""What a reference-based reward model (Cooper's VerifyRM, arXiv 2508.05613) reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST, FIRST, LAST = 1500, 500, 1000
"""A reference or completion that is longer, in characters, keeps its first and last ones (``cooper_format_prompt``)."""


def verify_text(question: str, reference: str, completion: str) -> str:
    """The input that scores ``completion`` as an answer to ``question`` whose right answer is ``reference``."""
    return (
        f"<question>{question}</question>\n<reference_answer>{_cut(reference)}</reference_answer>\n"
        f"<completion>{_cut(completion)}</completion>"
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:FIRST] + text[-LAST:]


def encode_verify(
    tokenizer: PreTrainedTokenizerBase, question: str, reference: str, completion: str
) -> tuple[int, ...]:
    """Its tokens: plain text, without a chat template or special tokens."""
    return tuple(tokenizer.encode(verify_text(question, reference, completion), add_special_tokens=False))
