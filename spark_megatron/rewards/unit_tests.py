"""The tests of a code task: how they are written down, what a program is asked, and whether its answers are right.

The gold answer of a code task is a JSON object::

    {"tests": [
        {"stdin": "2 3\\n", "stdout": "5\\n"},
        {"call": "add", "args": [2, 3], "returns": 5},
        {"assert": "assert add(2, 3) == 5"}
     ],
     "tolerance": 1e-6}

``stdin`` runs the program as a script and compares what it prints, line by line, without spaces at the ends of lines
and empty lines at the end; the program must end without an error. ``call`` is anything that can be called (``add``,
``Solution().add``), with ``args`` and perhaps ``kwargs``; tuples in its value count as lists and keys as texts, as in
JSON. ``assert`` compares an expression by ``==`` (or ``is``, which is taken for it) with a literal, or claims one
(``f(1)``, ``not f(1)``) to be true, or close to a literal by ``math.isclose`` or ``abs(x - literal) < literal``.
``tolerance`` (absolute or relative, whichever is wider; default 0) is for all floating-point numbers, in printed lines
too.

Only inputs ever go to the program. Expected values stay here, where its answers arrive as plain text.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tolerance:
    """How far a floating-point number may be off: by either of the two."""

    relative: float
    absolute: float

    def allows(self, expected: Any, found: Any) -> bool:
        numbers = [x for x in (expected, found) if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) != 2 or not any(isinstance(number, float) for number in numbers):
            return False
        try:
            return math.isclose(expected, found, rel_tol=self.relative, abs_tol=self.absolute)
        except OverflowError:  # a whole number too large for a float
            return False


EXACT = Tolerance(0.0, 0.0)
_KEYS = ({"stdin", "stdout"}, {"call", "args", "returns"}, {"call", "args", "kwargs", "returns"}, {"assert"})


@dataclass(frozen=True)
class Printed:
    """A script's output for an input."""

    stdin: str
    stdout: str
    tolerance: Tolerance

    def passes(self, output: str) -> bool:
        wanted, got = (_lines(text) for text in (self.stdout, output))
        return len(wanted) == len(got) and all(map(self._close, wanted, got))

    def _close(self, wanted: str, got: str) -> bool:
        left, right = wanted.split(), got.split()
        return wanted == got or (
            self.tolerance != EXACT and len(left) == len(right) and all(map(self._same, left, right))
        )

    def _same(self, wanted: str, got: str) -> bool:
        return wanted == got or self.tolerance.allows(_number(wanted), _number(got))


@dataclass(frozen=True)
class Valued:
    """The value of an expression in the program's namespace."""

    expression: str
    expected: Any
    tolerance: Tolerance
    like_json: bool
    """Tuples count as lists, and keys as texts."""
    truth: bool = False
    """Only whether the value is true is asked: equal to ``expected``."""

    def passes(self, line: str) -> bool:
        try:
            found = json.loads(line)
            if not isinstance(found, list) or len(found) != 1:
                return False
            if self.truth:
                return _truth(found[0]) is self.expected
            return self._equal(self.expected, found[0])
        except (ValueError, TypeError, KeyError, RecursionError):  # the line is the program's: anything may be in it
            return False

    def _equal(self, expected: Any, found: Any) -> bool:
        """Goes by the expected value, so that what a program can make this do is bounded by the test."""
        if not isinstance(expected, list | tuple | set | frozenset | dict):
            if isinstance(found, list):
                return False
            return bool(expected == found) or self.tolerance.allows(expected, found)
        if not isinstance(found, list) or len(found) != 2 or len(found[1]) != len(expected):
            return False
        kind, items = found
        if isinstance(expected, dict):
            return kind == "dict" and self._equal_items(expected, items)
        if isinstance(expected, set | frozenset):
            return kind == "set" and {_plain(item) for item in items} == expected
        if kind != type(expected).__name__ and not (self.like_json and kind == "tuple"):
            return False
        return all(map(self._equal, expected, items))

    def _equal_items(self, expected: dict[Any, Any], items: list[Any]) -> bool:
        found = {self._key(_plain(key)): value for key, value in items}
        return found.keys() == expected.keys() and all(self._equal(expected[key], found[key]) for key in expected)

    def _key(self, key: Any) -> Any:
        return json.dumps(key) if self.like_json and not isinstance(key, str | tuple) else key


Test = Printed | Valued


def read_tests(answer: str) -> list[Test]:
    """The tests in a gold answer; raises ValueError that names the faulty one."""
    try:
        found = json.loads(answer, parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"the tests of a code task are no JSON: {error}") from error
    if not isinstance(found, Mapping) or not set(found) <= {"tests", "tolerance"} or not found.get("tests"):
        raise ValueError(f'the tests of a code task must be {{"tests": [...], "tolerance": 0}}, not {answer[:80]!r}')
    tolerance = found.get("tolerance", 0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance!r}: must be a number, 0 or more")
    if not isinstance(found["tests"], list):
        raise ValueError(f"tests={str(found['tests'])[:80]}: must be a list")
    return [
        _read(test, f"tests[{index}]", Tolerance(tolerance, tolerance)) for index, test in enumerate(found["tests"])
    ]


def _read(test: Any, name: str, tolerance: Tolerance) -> Test:
    if not isinstance(test, Mapping) or set(test) not in _KEYS:
        raise ValueError(f"{name} must have the keys {' or '.join(str(sorted(keys)) for keys in _KEYS)}: {test!r:.80}")
    texts = [key for key in ("stdin", "stdout", "call", "assert") if key in test and not isinstance(test[key], str)]
    if texts:
        raise ValueError(f"{name}.{texts[0]}={test[texts[0]]!r:.80}: must be a text")
    if "stdin" in test:
        return Printed(test["stdin"], test["stdout"], tolerance)
    if "call" in test:
        return _read_call(test, name, tolerance)
    try:
        return _read_assert(test["assert"], tolerance)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{name}.assert={test['assert']!r:.120}: {error}") from error


def _read_call(test: Mapping[str, Any], name: str, tolerance: Tolerance) -> Valued:
    args, kwargs = test["args"], test.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not all(map(str.isidentifier, kwargs)):
        raise ValueError(f"{name}: args must be a list and kwargs a mapping of names: {test!r:.80}")
    texts = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    expression = f"{test['call']}({', '.join(texts)})"
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{name}.call={test['call']!r}: cannot be called: {error}") from error
    return Valued(expression, test["returns"], tolerance, like_json=True)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _read_assert(line: str, tolerance: Tolerance) -> Valued:
    body = ast.parse(line.strip()).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError("must be one assert statement")
    claim = body[0].test
    if isinstance(claim, ast.Compare) and len(claim.ops) == 1:
        return _read_comparison(claim.left, claim.ops[0], claim.comparators[0], tolerance)
    if isinstance(claim, ast.Call) and ast.unparse(claim.func) in ("math.isclose", "isclose") and len(claim.args) == 2:
        left, expected = claim.args
        options = {word.arg: ast.literal_eval(word.value) for word in claim.keywords}
        width = Tolerance(options.get("rel_tol", 1e-9), options.get("abs_tol", 0.0))
        return Valued(ast.unparse(left), _value(expected), width, like_json=False)
    negated = isinstance(claim, ast.UnaryOp) and isinstance(claim.op, ast.Not)
    inner = claim.operand if isinstance(claim, ast.UnaryOp) and negated else claim
    return Valued(ast.unparse(inner), not negated, EXACT, like_json=False, truth=True)


def _read_comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr, tolerance: Tolerance) -> Valued:
    if isinstance(operator, ast.Lt | ast.LtE):
        if not (
            isinstance(left, ast.Call)
            and ast.unparse(left.func) == "abs"
            and isinstance(left.args[0], ast.BinOp)
            and isinstance(left.args[0].op, ast.Sub)
        ):
            raise ValueError("a comparison by < must have the form abs(expression - literal) < literal")
        asked, expected = left.args[0].left, _value(left.args[0].right)
        return Valued(ast.unparse(asked), float(expected), Tolerance(0.0, _value(right)), like_json=False)
    if not isinstance(operator, ast.Eq | ast.Is):
        raise ValueError("compare by == (or is) with a literal: the expected value must not reach the program")
    sides = [(left, right), (right, left)] if _is_literal(left) else [(right, left)]
    for literal, asked in sides:
        if _is_literal(literal) and not _is_literal(asked):
            return Valued(ast.unparse(asked), _value(literal), tolerance, like_json=False)
    raise ValueError("one side must be a literal and the other one not: the expected value must not reach the program")


def _is_literal(node: ast.expr) -> bool:
    try:
        _value(node)
    except (ValueError, TypeError):
        return False
    return True


def _value(node: ast.expr) -> Any:
    """A literal's value; ``set(...)``, ``tuple(...)``, ``list(...)`` and ``float("inf")`` around one count too."""
    kinds: dict[str, Any] = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "float": float}
    if isinstance(node, ast.Call) and ast.unparse(node.func) in kinds and len(node.args) <= 1 and not node.keywords:
        return kinds[ast.unparse(node.func)](*map(_value, node.args))
    return ast.literal_eval(node)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _plain(found: Any) -> Any:
    """What may stand in a set or be a key, from its JSON form."""
    if not isinstance(found, list):
        return found
    kind, items = found
    values = [_plain(item) for item in items]
    return {"tuple": tuple, "set": frozenset}[kind](values)


def _truth(found: Any) -> bool:
    if not isinstance(found, list):
        return bool(found)
    if len(found) != 2:
        raise TypeError("the truth of an object is not known here")
    return bool(found[1])


def expressions(tests: Sequence[Test]) -> list[str]:
    """What a program is asked to evaluate for the tests by value."""
    return [test.expression for test in tests if isinstance(test, Valued)]
