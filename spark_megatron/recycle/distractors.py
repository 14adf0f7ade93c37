"""Wrong answers that look plausible."""

from __future__ import annotations

import random
import re

_INTEGER = re.compile(r"-?\d+", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)


def near_miss(answer: str, rng: random.Random) -> str:
    """A whole number off by 1, 2, 3 or 10 either way; of any other answer, the last run of digits increased by that.

    Never equal to ``answer``. Raises ValueError where it holds no digit.
    """
    offset = rng.choice((1, 1, 2, 2, 3, 10))
    if _INTEGER.fullmatch(answer):
        return str(int(answer) + offset * rng.choice((-1, 1)))
    runs = list(_DIGITS.finditer(answer))
    if not runs:
        raise ValueError(f"no near miss of {answer!r}: it holds no number")
    last = runs[-1]
    return f"{answer[: last.start()]}{str(int(last[0]) + offset).zfill(len(last[0]))}{answer[last.end() :]}"
