"""The rule verifier of mathematical answers."""

from __future__ import annotations

import re
from decimal import Decimal

from spark_megatron.rewards.isolation import CheckCrash, CheckTimeout, SymbolicChecker
from spark_megatron.rewards.protocol import read_box
from spark_megatron.types import Task, Verdict

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;:]"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\s+"), " "),
)
_TEXT_MACRO = re.compile(r"\\(?:text|mathrm|textbf|mathbf) ?\{([^{}]*)\}")
_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+)(\.\d*)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_WORDS = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")
_ARITHMETIC = re.compile(
    r"[0-9A-Za-z)}.!] ?[+\-*] ?[0-9A-Za-z(\\.]"
    r"|\\(?:times|cdot|div)(?! ?10 ?\^)"
    r"|[0-9.] +[0-9.]"
)
r"""A sum, difference or product still to be worked out, or numbers side by side, which math-verify adds.

Not ``1.2 \times 10^{3}``, which is a number.
"""


def normalise(answer: str) -> str:
    r"""One spelling for answers that differ in typography only.

    Math delimiters, spacing macros, ``\dfrac``, Unicode minus signs, thousands separators, a currency or percent sign
    and a final full stop go. Commas that do not group thousands stay: they separate list items.
    """
    text = answer
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".").strip("$ ")
    text = text.removeprefix("\\$").lstrip("$ ").removesuffix("%").removesuffix("\\").rstrip()
    macro = _TEXT_MACRO.fullmatch(text)
    text = macro[1].strip() if macro else text
    thousands = _THOUSANDS.fullmatch(text)
    return thousands[1] + thousands[2].replace(",", "") + (thousands[3] or "") if thousands else text


class MathVerifier:
    r"""Compares the last ``\boxed{}`` with the gold answer: as strings, as decimal numbers, then by ``symbolic``.

    The first comparison that applies decides. ``symbolic`` (None: never) is asked about everything that is neither
    equal as text nor a pair of plain numbers, except where its answer could not be trusted: an answer in words, and
    arithmetic that is left to do where the gold answer is a plain number (echoing the question earns nothing).
    A check that ran out of time is ``timeout``, one whose process died is ``error``.
    """

    def __init__(self, *, symbolic: SymbolicChecker | None) -> None:
        self._symbolic = symbolic

    def __call__(self, task: Task, response: str, finish: str) -> Verdict:
        if not task.answer.strip():
            raise ValueError(f"task {task.id} has an empty gold answer")
        content = read_box(response, finish)
        if isinstance(content, Verdict):
            return content
        try:
            return Verdict("ok", float(self._equal(task.answer, content)), content)
        except CheckTimeout:
            return Verdict("timeout", parsed=content)
        except CheckCrash:
            return Verdict("error", parsed=content)

    def _equal(self, gold: str, answer: str) -> bool:
        left, right = normalise(gold), normalise(answer)
        if not left or not right:
            return gold.strip() == answer.strip()
        if left == right:
            return True
        left_number, right_number = _NUMBER.fullmatch(left), _NUMBER.fullmatch(right)
        if left_number and right_number:
            return Decimal(left) == Decimal(right)
        if _WORDS.fullmatch(left) or _WORDS.fullmatch(right):
            return left.casefold() == right.casefold()
        if self._symbolic is None or (left_number and _ARITHMETIC.search(right)):
            return False
        return self._symbolic.equal(left, right)
