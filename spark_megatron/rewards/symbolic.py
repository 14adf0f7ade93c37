"""The worker behind ``SymbolicChecker``: compares pairs of answers with math-verify, one JSON line each.

Run as a module only. Its one argument is the limit of its address space in GiB.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

RELATIVE_TOLERANCE = 1e-5


def symbolic_equal(gold: str, answer: str) -> bool:
    """Whether both sides parse and are mathematically equal. Has no time limit of its own."""
    # The library's own limits use SIGALRM; this process is limited from outside. Without the string fallback, two
    # sides that cannot be parsed are two empty lists, which are not equal.
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    sides = [
        parse(f"\\boxed{{{side}}}", config, fallback_mode="no_fallback", parsing_timeout=None)
        for side in (gold, answer)
    ]
    if not all(sides) or not verify(*sides, timeout_seconds=None):
        return False
    return _close(sides[0][0], sides[1][0])


def _close(gold: Any, answer: Any) -> bool:
    """Checks the relative distance of two real numbers: math-verify compares them with an absolute tolerance."""
    if not all(getattr(side, "is_number", False) and getattr(side, "is_real", False) for side in (gold, answer)):
        return True
    distance, scale = abs(gold - answer).evalf(30), max(abs(gold).evalf(30), abs(answer).evalf(30))
    return bool(distance <= RELATIVE_TOLERANCE * scale)


def main() -> None:
    """Answers questions from stdin until it closes."""
    limit = int(float(sys.argv[1]) * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable(logging.CRITICAL)
    if not symbolic_equal("0.5", "1/2"):
        sys.exit(f"memory_gib={sys.argv[1]}: too little for a comparison")
    print("ready", flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        print("equal" if symbolic_equal(gold, answer) else "unequal", flush=True)


if __name__ == "__main__":
    main()
