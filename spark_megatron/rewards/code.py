"""The verifier of programs: runs them against the task's tests."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from spark_megatron.rewards.credit import Credit
from spark_megatron.rewards.sandbox import Sandbox, SandboxError
from spark_megatron.rewards.unit_tests import Printed, Test, Valued, expressions, read_tests
from spark_megatron.types import Task, Verdict

_LOG = logging.getLogger(__name__)

_FENCE = re.compile(r"^[ \t]*(?P<mark>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


def last_program(text: str) -> str | None:
    """The last complete fenced block marked as Python; where none is, the last one without a language."""
    named, plain, opening = None, None, None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence["mark"].startswith(opening["mark"]):
            continue  # belongs to the block's text
        elif fence["language"]:
            opening = fence  # the block before was never closed
        else:
            content, language = text[opening.end() + 1 : fence.start()], opening["language"].lower()
            named = content if language in _PYTHON else named
            plain = content if not language else plain
            opening = None
    return plain if named is None else named


@dataclass(frozen=True)
class _Result:
    passed: tuple[bool, ...]
    timed_out: bool
    """Whether the first test that failed ran out of time."""


class CodeVerifier:
    """Runs the last Python block of a response in ``sandbox`` against the tests in the task's answer (``unit_tests``).

    ``credit`` None: reward 1 for a program that passes all tests, 0 for any other; it is stopped at its first failure.
    Otherwise all tests are run and ``credit`` says what the programs of a group earn. The status is ``timeout`` where
    nothing was earned and the first test that failed did so because time ran out, ``error`` where the program could not
    be started; a program that crashes, prints too much or exits early is wrong, not an error. All tests by value share
    one process, in order, and come first; each test by stdin has a process of its own.
    """

    def __init__(self, *, sandbox: Sandbox, credit: Credit | None) -> None:
        self._sandbox, self._credit = sandbox, credit

    def __call__(self, task: Task, response: str, finish: str) -> Verdict:
        return self.check_many([(task, response, finish)])[0]

    def check_many(self, checks: Sequence[tuple[Task, str, str]]) -> list[Verdict]:
        """One verdict per (task, response, finish reason), in order; those of the same task are one group.

        Raises:
            ValueError: a task's answer holds no tests.
        """
        tests = {answer: _tests(task) for answer, task in {task.answer: task for task, _, _ in checks}.items()}
        programs = [last_program(response) for _, response, _ in checks]
        with ThreadPoolExecutor(self._sandbox.children) as pool:
            answers = [task.answer for task, _, _ in checks]
            results = list(pool.map(lambda program, answer: self._try(program, tests[answer]), programs, answers))
        groups: dict[str, list[int]] = {}
        for index, (task, _, _) in enumerate(checks):
            if results[index] is not None:
                groups.setdefault(task.id, []).append(index)
        rewards: dict[int, float] = {}
        for members in groups.values():
            ran = [result.passed for result in map(results.__getitem__, members) if result is not None]
            rewards |= zip(members, self._rewards(ran), strict=True)
        return [
            _verdict(program, finish, result, rewards.get(index, 0.0))
            for index, (program, (_, _, finish), result) in enumerate(zip(programs, checks, results, strict=True))
        ]

    def _rewards(self, passed: Sequence[tuple[bool, ...]]) -> list[float]:
        if self._credit is None:
            return [float(all(row)) for row in passed]
        return self._credit(passed)

    def _try(self, program: str | None, tests: Sequence[Test]) -> _Result | None:
        try:
            return None if program is None or not program.strip() else self._run(program, tests)
        except SandboxError as error:
            _LOG.warning("a program could not be run: %s", error)
            return None

    def _run(self, program: str, tests: Sequence[Test]) -> _Result:
        passed, failed_late = [False] * len(tests), []
        valued = [index for index, test in enumerate(tests) if isinstance(test, Valued)]
        if valued:
            run = self._sandbox.run(program, expressions=expressions(tests))
            lines = run.output.split("\n")[:-1]
            for index, line in itertools.zip_longest(valued, lines[: len(valued)]):
                passed[index] = line is not None and tests[index].passes(line)
                if not passed[index]:
                    failed_late.append(line is None and run.end == "timeout")
        for index, test in enumerate(tests):
            if isinstance(test, Printed) and not (failed_late and self._credit is None):
                run = self._sandbox.run(program, stdin=test.stdin)
                passed[index] = (run.end, run.code) == ("exit", 0) and test.passes(run.output)
                if not passed[index]:
                    failed_late.append(run.end == "timeout")
        return _Result(tuple(passed), failed_late[:1] == [True])


def _tests(task: Task) -> list[Test]:
    try:
        return read_tests(task.answer)
    except ValueError as error:
        raise ValueError(f"task {task.id}: {error}") from error


def _verdict(program: str | None, finish: str, result: _Result | None, reward: float) -> Verdict:
    if program is None or not program.strip():
        return Verdict("truncated" if finish == "length" and program is None else "unparsed")
    if result is None:
        return Verdict("error", parsed=program)
    return Verdict("timeout" if result.timed_out and reward == 0.0 else "ok", reward, program)
