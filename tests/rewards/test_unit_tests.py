from __future__ import annotations

import json
from typing import Any

import pytest

from spark_megatron.rewards.program import encode
from spark_megatron.rewards.unit_tests import Printed, Valued, read_tests


def read(*tests: dict[str, Any], **more: Any) -> list[Any]:
    return read_tests(json.dumps({"tests": tests, **more}))


def asserted(line: str, **more: Any) -> Valued:
    (test,) = read({"assert": line}, **more)
    assert isinstance(test, Valued)
    return test


def reply(value: Any) -> str:
    return json.dumps([encode(value)])


@pytest.mark.parametrize(
    ("wanted", "got", "passes"),
    [
        ("5\n", "5", True),
        ("5", "5 \n\n", True),
        ("1 2\n3", "1 2\r\n3\r\n", True),
        ("5", "6", False),
        ("5", "", False),
        ("", "", True),
        ("1 2", "1  2", False),
        ("a\nb", "a\n\nb", False),
        (" 5", "5", False),
        ("0.333333", "0.3333334", False),
    ],
)
def test_printed_lines(wanted: str, got: str, passes: bool) -> None:
    (test,) = read({"stdin": "", "stdout": wanted})
    assert test.passes(got) == passes


@pytest.mark.parametrize(
    ("wanted", "got", "passes"),
    [
        ("x = 0.333333", "x  =  0.3333334", True),
        ("1000000", "1000000.5", True),
        ("0", "1e-7", True),
        ("0.5", "0.6", False),
        ("yes", "no", False),
        ("nan", "NaN", False),
        ("1 2", "1", False),
    ],
)
def test_printed_numbers_within_a_tolerance(wanted: str, got: str, passes: bool) -> None:
    (test,) = read({"stdin": "", "stdout": wanted}, tolerance=1e-6)
    assert test.passes(got) == passes


@pytest.mark.parametrize(
    ("returns", "value", "passes"),
    [
        (5, 5, True),
        (5, 5.0, True),
        (5, "5", False),
        ([1, [2, 3]], (1, (2, 3)), True),
        ([1, 2], [2, 1], False),
        ([1, 2], {1, 2}, False),
        ([], [], True),
        (None, None, True),
        (None, [], False),
        (0, None, False),
        ({"1": [2]}, {1: (2,)}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        ("x", "x", True),
        (0.3, 0.1 + 0.2, False),
        (5, object(), False),
        ([5], [object()], False),
        (2**70, 2**70, True),
    ],
)
def test_values_of_calls(returns: Any, value: Any, passes: bool) -> None:
    (test,) = read({"call": "f", "args": [1, "a"], "kwargs": {"k": None}, "returns": returns})
    assert test.expression == "f(1, 'a', k=None)"
    assert test.passes(reply(value)) == passes


def test_tolerance_is_for_floating_point_numbers_only() -> None:
    (test,) = read({"call": "f", "args": [], "returns": [0.3, 5]}, tolerance=0.1)
    assert test.passes(reply([0.31, 5]))
    assert test.passes(reply([0.31, 5.1]))
    assert not test.passes(reply([0.6, 5]))
    assert not test.passes(reply([0.3, 6]))
    assert not test.passes(reply(["0.3", 5]))
    (exact,) = read({"call": "f", "args": [], "returns": 1}, tolerance=0.5)
    assert not exact.passes(reply(True + 1))


@pytest.mark.parametrize(
    ("line", "expression", "good", "bad"),
    [
        ("assert f(1) == 2", "f(1)", 2, 3),
        ("assert 2 == f(1)", "f(1)", 2, 3),
        ("assert f([1, 2]) == (1, 'a')", "f([1, 2])", (1, "a"), [1, "a"]),
        ("assert set(f(1)) == {1, 2}", "set(f(1))", {2, 1}, {1}),
        ("assert f(1) == set([1, 2])", "f(1)", {2, 1}, [1, 2]),
        ("assert f(1) == {(1, 2): [3]}", "f(1)", {(1, 2): [3]}, {(1, 2): (3,)}),
        ("assert f(1) is None", "f(1)", None, 0),
        ("assert f(1) is True, 'message'", "f(1)", True, False),
        ("assert f(1)", "f(1)", [0], []),
        ("assert not f(1)", "f(1)", "", "no"),
        ("assert math.isclose(f(1), 2.5, rel_tol=0.1)", "f(1)", 2.7, 2.9),
        ("assert abs(f(1) - 1000000) < 0.5", "f(1)", 1000000.25, 1000001.0),
        ("assert f(1) == -1.5", "f(1)", -1.5, 1.5),
        ("assert f(1) == float('inf')", "f(1)", float("inf"), 1e308),
    ],
)
def test_asserts_are_split_into_what_is_asked_and_what_is_expected(
    line: str, expression: str, good: Any, bad: Any
) -> None:
    test = asserted(line)
    assert test.expression == expression
    assert test.passes(reply(good))
    assert not test.passes(reply(bad))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "[]",
        "[1, 2]",
        "{}",
        "[[",
        '["2"]',
        "[true]x",
        "[" * 100_000,
        '[["list", 5]]',
        '[["set", [["list", []], ["list", []]]]]',
        '[["dict", [[1], [2]]]]',
        "9" * 5000,
        '[["other"]]',
    ],
)
@pytest.mark.parametrize("expected", ["2", "[1, 2]", "{1, 2}", "{1: 2, 3: 4}"])
def test_forged_replies_are_no_values(line: str, expected: str) -> None:
    assert not asserted(f"assert f() == {expected}").passes(line)


def test_expected_values_do_not_go_to_the_program() -> None:
    tests = read(
        {"stdin": "4", "stdout": "SECRET"},
        {"call": "f", "args": [4], "returns": "SECRET"},
        {"assert": "assert f(4) == 'SECRET'"},
        {"assert": "assert abs(f(4) - 31337) < 1"},
    )
    asked = [test.stdin if isinstance(test, Printed) else test.expression for test in tests]
    assert asked == ["4", "f(4)", "f(4)", "f(4)"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("assert f(1) == 2", "are no JSON"),
        ("[]", 'must be {"tests"'),
        ('{"tests": []}', 'must be {"tests"'),
        ('{"tests": [{}], "tolerence": 1}', 'must be {"tests"'),
        ('{"tests": {"a": 1}}', "must be a list"),
        ('{"tests": [{"stdin": ""}]}', r"tests\[0\] must have the keys"),
        ('{"tests": [{"stdin": 4, "stdout": "5"}]}', r"tests\[0\].stdin=4: must be a text"),
        ('{"tests": [{"call": "f", "args": 4, "returns": 5}]}', r"tests\[0\]: args must be a list"),
        ('{"tests": [{"call": "f(", "args": [], "returns": 5}]}', r"tests\[0\].call='f\('"),
        ('{"tests": [{"call": "f", "args": [NaN], "returns": 5}]}', "NaN is no JSON"),
        ('{"tests": [{"assert": "f(1) == 2"}]}', "must be one assert"),
        ('{"tests": [{"assert": "assert f(1) == g(2)"}]}', "one side must be a literal"),
        ('{"tests": [{"assert": "assert f(1) > 2"}]}', "compare by =="),
        ('{"tests": [{"assert": "assert f(1) < 2"}]}', r"abs\(expression - literal\)"),
        ('{"tests": [{"assert": "assert ("}]}', r"tests\[0\].assert="),
        ('{"tests": [{"assert": "assert f()"}], "tolerance": -1}', "tolerance=-1"),
        ('{"tests": [{"assert": "assert f()"}], "tolerance": true}', "tolerance=True"),
    ],
)
def test_faulty_tests_are_named(answer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(answer)
