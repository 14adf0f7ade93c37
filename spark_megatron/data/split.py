"""Which questions are held out."""

from __future__ import annotations

import hashlib
import unicodedata


def question_hash(question: str) -> str:
    """SHA-256 (hex) of the question up to case, spacing and Unicode compatibility forms."""
    text = " ".join(unicodedata.normalize("NFKC", question).casefold().split())
    return hashlib.sha256(text.encode()).hexdigest()


def is_heldout(question: str, share: float) -> bool:
    """Whether a question belongs to the held-out ``share`` of all questions.

    Depends on the question alone: train and held-out sets never meet, whatever the seed, the size or the source.
    """
    return int(question_hash(question)[:16], 16) < share * 2**64
