from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from spark_megatron.rewards.isolation import CheckCrash, SymbolicChecker, _read_line
from spark_megatron.rewards.math import MathVerifier, normalise
from spark_megatron.types import Task, Verdict


def task(answer: str) -> Task:
    return Task("t1", "solve", "prompt", answer, "math", "question")


@pytest.fixture(scope="module")
def checker() -> Iterator[SymbolicChecker]:
    checker = SymbolicChecker(timeout_seconds=20.0, start_seconds=120.0, memory_gib=4.0)
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def verifier(checker: SymbolicChecker) -> MathVerifier:
    return MathVerifier(symbolic=checker)


PLAIN = MathVerifier(symbolic=None)

EXACT = [
    ("42", "42", 1),
    ("42", "43", 0),
    ("5.00", "5", 1),
    (".5", "0.5", 1),
    ("+7", "7", 1),
    ("007", "7", 1),
    ("−5", "-5", 1),
    ("-5", "5", 0),
    ("1,234,567", "1234567", 1),
    ("1{,}234", "1234", 1),
    ("1,234.50", "1234.5", 1),
    ("[8.124,12.852]", "[8.124, 12.852]", 0),  # a list keeps its commas; equal only for the symbolic check
    ("12,34", "1234", 0),
    (r"\$18", "18", 1),
    ("$18$", "18", 1),
    ("18.", "18", 1),
    (r"50\%", "50", 1),
    ("50%", "50", 1),
    (r"\text{square}", "circle", 0),
    (r"\text{Monday}", "monday", 1),
    (r"\text{dog}", "god", 0),
    (r"\dfrac{3}{4}", r"\frac{3}{4}", 1),
    (r"\left(1, 2\right)", "(1, 2)", 1),
    (r"\leftarrow", "arrow", 0),
    ("9" * 5000, "9" * 5000 + ".0", 1),
    ("9" * 5000, "9" * 4999 + "8", 0),
    ("2e-3", "0.002", 1),
    ("1e999", "1" + "0" * 999, 1),
    ("11 8", "19", 0),
    ("6 + 5 - 3", "8", 0),
]


@pytest.mark.parametrize(("answer", "gold", "reward"), EXACT)
def test_exact_comparison(answer: str, gold: str, reward: int) -> None:
    assert PLAIN(task(gold), f"so \\boxed{{{answer}}}", "stop") == Verdict("ok", float(reward), answer)


SYMBOLIC = [
    (r"1\frac{1}{2}", r"\frac{3}{2}", 1),
    ("0.75", r"\frac34", 1),
    (r"\frac{\sqrt2}{2}", r"\frac1{\sqrt2}", 1),
    (r"\{2,1\}", r"\{1,2\}", 1),
    ("(2,1)", "(1,2)", 0),
    (r"1.2 \times 10^{3}", "1200", 1),
    (r"5\text{ cm}", "5", 1),
    ("x = 7", "7", 1),
    (r"90^\circ", "90", 1),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}", 0),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0),
    ("0.333333", r"\frac{1}{3}", 1),
    ("n=2,3,4", "n=1,2,3", 0),
    ("12:00", "1:00", 0),
    ("2021", r"\pm 2021", 0),
    (r"1+\frac{1}{e}", r"1-\frac{1}{e}", 0),
    (r"\emptyset", "7", 0),
    (r"\text{degrees}", r"\text{feet}", 0),
    (r"\frac", "1", 0),
    ("3/", "3", 0),
    (r"\sqrt", "2", 0),
    ("7, 8", "7", 0),
    ("8 + 3", "11", 0),  # left to be worked out
    ("6+5-3", "8", 0),
    (r"3 \times 4", "12", 0),
    ("(2)(4)-1", "7", 0),
    (r"1.2 \times 10^{-3}", "0.0012", 1),
    (r"$\frac{1}{2}$", "0.5", 1),
    (r"\frac{6+10}{2}", "8", 0),
    ("7 8", "15", 0),  # math-verify alone reads a mixed number
    ("-7", r"-\frac{14}{2}", 1),
]


@pytest.mark.parametrize(("answer", "gold", "reward"), SYMBOLIC)
def test_symbolic_comparison(verifier: MathVerifier, answer: str, gold: str, reward: int) -> None:
    assert verifier(task(gold), f"so \\boxed{{{answer}}}", "stop") == Verdict("ok", float(reward), answer)


@pytest.mark.parametrize(
    ("response", "finish", "status"),
    [
        ("The answer is 42.", "stop", "unparsed"),
        ("The answer is 42.", "length", "truncated"),
        (r"so \boxed{42", "stop", "unparsed"),
        (r"so \boxed{42", "length", "truncated"),
        (r"so \boxed{}", "stop", "unparsed"),
        ("", "stop", "unparsed"),
    ],
)
def test_no_box_is_a_status(response: str, finish: str, status: str) -> None:
    assert PLAIN(task("42"), response, finish) == Verdict(status)  # type: ignore[arg-type]


def test_a_complete_box_counts_even_where_the_response_was_cut() -> None:
    assert PLAIN(task("42"), r"\boxed{42} and so on", "length") == Verdict("ok", 1.0, "42")


def test_last_box_decides() -> None:
    assert PLAIN(task("4"), r"First \boxed{3}, wait, so \boxed{4}.", "stop").reward == 1.0
    assert PLAIN(task("4"), r"First \boxed{4}, no: \boxed{3}.", "stop").reward == 0.0


@pytest.mark.parametrize(("left", "right"), [(r"\left.\right.", "\\,"), ("%", "$"), ("{,}", ".")])
def test_sides_that_normalise_to_nothing_are_not_equal(left: str, right: str) -> None:
    assert PLAIN(task(right), f"\\boxed{{{left}}}", "stop").reward == 0.0


def test_empty_gold_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="t1 has an empty gold answer"):
        PLAIN(task(" "), r"\boxed{1}", "stop")


def test_normalise_is_idempotent() -> None:
    for answer, gold, _ in EXACT + SYMBOLIC:
        for text in (answer, gold):
            assert normalise(normalise(text)) == normalise(text)


def test_works_outside_the_main_thread(verifier: MathVerifier) -> None:
    found: list[Verdict] = []
    gold = task(r"\frac{1}{3}")
    thread = threading.Thread(target=lambda: found.append(verifier(gold, r"\boxed{\frac{2}{6}}", "stop")))
    thread.start()
    thread.join()
    assert found == [Verdict("ok", 1.0, r"\frac{2}{6}")]


def test_a_hanging_check_is_a_timeout_and_the_next_one_works() -> None:
    checker = SymbolicChecker(timeout_seconds=1.5, start_seconds=120.0, memory_gib=4.0)
    verifier = MathVerifier(symbolic=checker)
    tower = r"9^{9^{9^{9}}}"
    assert verifier(task(r"\frac{1}{7}"), f"\\boxed{{{tower}}}", "stop") == Verdict("timeout", parsed=tower)
    assert verifier(task(r"\frac34"), r"\boxed{0.75}", "stop") == Verdict("ok", 1.0, "0.75")
    checker.close()


def test_a_worker_that_dies_is_an_error() -> None:
    ends = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    with subprocess.Popen(ends, stdout=subprocess.PIPE) as worker, pytest.raises(CheckCrash, match="code 3"):
        _read_line(worker, 60.0)

    class Dying(SymbolicChecker):
        def equal(self, gold: str, answer: str) -> bool:
            raise CheckCrash("died")

    verifier = MathVerifier(symbolic=Dying(timeout_seconds=1.0, start_seconds=1.0, memory_gib=1.0))
    assert verifier(task("x"), r"\boxed{y}", "stop") == Verdict("error", parsed="y")


def test_a_worker_that_cannot_start_is_named() -> None:
    checker = SymbolicChecker(timeout_seconds=1.0, start_seconds=60.0, memory_gib=0.001)
    with pytest.raises(RuntimeError, match="memory_gib"):
        checker.equal("x", "y")


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout_seconds=0"):
        SymbolicChecker(timeout_seconds=0, start_seconds=1, memory_gib=1)
