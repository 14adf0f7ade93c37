"""Hybrid annotation (Cooper, arXiv 2508.05613): a label counts where a rule and a language model agree on it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from spark_megatron.data.jsonl import text_field
from spark_megatron.recycle.templates import fill
from spark_megatron.types import Verdict

INSTRUCTION = (
    "You compare the final result of a solution with the reference answer to the same problem. Only the final result "
    "counts, not how it was reached or how it is written. End with one line: Final Judgment: Yes if the two are the "
    "same, Final Judgment: No if they are not, or if there is no final result."
)
MESSAGE = "Problem: {question}\n\nReference answer: {reference}\n\nSolution: {completion}"
_JUDGEMENT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Candidate:
    """A completion without a label."""

    question: str
    reference: str
    completion: str

    @classmethod
    def of(cls, row: Any, where: str) -> Candidate:
        """From a row with question, reference_answer and completion; ValueError names what is missing."""
        return cls(*(text_field(row, field, where) for field in ("question", "reference_answer", "completion")))

    @property
    def id(self) -> str:
        """Equal for equal contents."""
        return hashlib.sha256(repr((self.question, self.reference, self.completion)).encode()).hexdigest()[:16]

    @property
    def message(self) -> str:
        """What a language model is asked."""
        fields = {"question": self.question, "reference": self.reference, "completion": self.completion}
        return fill(MESSAGE, fields)


def read_judgement(reply: str) -> bool | None:
    """The last yes or no of a reply; None where it has neither."""
    words = _JUDGEMENT.findall(reply)
    return words[-1].lower() == "yes" if words else None


def agreed(rule: Verdict, judged: bool | None) -> bool | None:
    """The label that both give; None where they differ or one of them gives none."""
    if rule.status != "ok" or rule.reward not in (0.0, 1.0) or judged is None:
        return None
    return judged if judged == (rule.reward == 1.0) else None
