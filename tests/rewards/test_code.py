from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from spark_megatron.cli.compose import compose_config
from spark_megatron.cli.nodes import check_nodes
from spark_megatron.rewards.code import CodeVerifier, last_program
from spark_megatron.rewards.credit import PassedShare, RareTests
from spark_megatron.rewards.sandbox import Sandbox
from spark_megatron.schema import ConfigError
from spark_megatron.types import Task, Verdict
from tests.rewards.escapes import LIMITS
from tests.settings import composed

ADD = "def add(a, b):\n    return a + b\n"
SQUARE = {"tests": [{"call": "square", "args": [n], "returns": n * n + 7919} for n in (3, 4)]}
"""A task whose answers cannot be guessed."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(limits=replace(LIMITS, cpu_seconds=1, wall_seconds=3.0), children=2, isolation="auto")
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def verifier(sandbox: Sandbox) -> CodeVerifier:
    return CodeVerifier(sandbox=sandbox, credit=None)


def task(answer: object) -> Task:
    return Task("t1", "solve", "prompt", json.dumps(answer), "code", "question")


def block(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


ADDITIONS = task(
    {
        "tests": [
            {"call": "add", "args": [2, 3], "returns": 5},
            {"assert": "assert add('a', 'b') == 'ab'"},
            {"assert": "assert add([1], [2]) == [1, 2]"},
        ]
    }
)
SUMS = task({"tests": [{"stdin": f"{a} {b}\n", "stdout": f"{a + b}\n"} for a, b in ((1, 2), (30, 4), (-5, 5))]})


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```Python3\na\n```", "a\n"),
        ("```py\na\n```\nthen\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nprints\n```text\nb\n```", "a\n"),
        ("```python\na\n```\nprints\n```\nb\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("1. First\n   ```python\n   a\n   ```", "   a\n"),
        ("```python title=x\na\n```", "a\n"),
        ("```python\n```", ""),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python\na\n\n```python\nb\n```", "b\n"),
        ("```cpp\na\n```", None),
        ("```python\na", None),
        ("`python a`", None),
        ("", None),
    ],
)
def test_the_last_complete_python_block(text: str, program: str | None) -> None:
    assert last_program(text) == program


@pytest.mark.parametrize("unit", ["```", "```\n", "```python\n", "~~~\n", " " * 50 + "```", "`"])
def test_degenerate_text_takes_one_pass(unit: str) -> None:
    last_program(unit * 50_000)


@pytest.mark.parametrize(
    ("given", "program", "reward"),
    [
        (ADDITIONS, ADD, 1.0),
        (ADDITIONS, "def add(a, b): return 5", 0.0),
        (ADDITIONS, "def plus(a, b): return a + b", 0.0),
        (ADDITIONS, "def add(a, b) return a + b", 0.0),
        (ADDITIONS, ADD + "1 / 0", 0.0),
        (ADDITIONS, ADD + "if __name__ == '__main__': input()", 1.0),
        (SUMS, "print(sum(map(int, input().split())))", 1.0),
        (SUMS, "import sys\nprint(sum(map(int, sys.stdin.read().split())))", 1.0),
        (SUMS, "print(3)", 0.0),
        (SUMS, "print(sum(map(int, input().split())))\n1 / 0", 0.0),
        (SUMS, "if __name__ == '__main__': print(sum(map(int, input().split())))", 1.0),
    ],
)
def test_a_program_passes_all_tests_or_earns_nothing(
    verifier: CodeVerifier, given: Task, program: str, reward: float
) -> None:
    assert verifier(given, block(program), "stop") == Verdict("ok", reward, program + "\n")


@pytest.mark.parametrize(
    ("response", "finish", "status"),
    [
        ("no program", "stop", "unparsed"),
        ("no program", "length", "truncated"),
        ("```python\ndef add(a, b):", "length", "truncated"),
        ("```python\ndef add(a, b):", "stop", "unparsed"),
        (block(""), "stop", "unparsed"),
        (block("while True: pass"), "stop", "timeout"),
        (block("import time\ntime.sleep(60)"), "stop", "timeout"),
    ],
)
@pytest.mark.parametrize("given", [ADDITIONS, SUMS], ids=["values", "stdin"])
def test_statuses(verifier: CodeVerifier, given: Task, response: str, finish: str, status: str) -> None:
    verdict = verifier(given, response, finish)
    assert (verdict.status, verdict.reward) == (status, 0.0)


def test_time_that_runs_out_after_a_wrong_answer_does_not_matter(verifier: CodeVerifier) -> None:
    program = "def add(a, b):\n    if a == 2: return 0\n    while True: pass"
    assert verifier(ADDITIONS, block(program), "stop").status == "ok"


def test_a_complete_program_counts_even_where_the_response_was_cut(verifier: CodeVerifier) -> None:
    assert verifier(ADDITIONS, block(ADD) + " and so", "length").reward == 1.0


FORGERIES = {
    "early exit": "import sys\nsys.exit(0)",
    "early exit in a call": "def square(n):\n    raise SystemExit(0)",
    "hard exit": "import os\nos._exit(0)",
    "hard exit in a call": "import os\ndef square(n): os._exit(0)",
    "equal to everything": (
        "class Any(int):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 0\n"
        "def square(n): return Any()"
    ),
    "equal text": "class Any(str):\n    __eq__ = lambda s, o: True\ndef square(n): return Any()",
    "patched json": "import json\njson.dumps = lambda *a, **k: '[true]'\ndef square(n): return 0",
    "patched builtins": (
        "import builtins\nbuiltins.eval = builtins.repr = builtins.isinstance = builtins.type = lambda *a, **k: True\n"
        "builtins.AssertionError = BaseException\ndef square(n): return 0"
    ),
    "patched modules": (
        "import sys, types\n"
        "for name in ('json', 'os', '__main__', 'program'): sys.modules[name] = types.ModuleType(name)\n"
        "def square(n): return 0"
    ),
    "printed results": "print('[true]', 'PASSED', 'ok', sep='\\n')\nprint('{\"passed\": true}')",
    "forged results": ('import os\nos.write(4, b\'[true]\\n[true]\\n{"end": "exit", "code": 0}\\n\')\nos._exit(0)'),
    "results through every descriptor": (
        "import os\nfor number in range(64):\n"
        '    try: os.write(number, b\'{"end": "exit", "code": 0, "output": ""}\\n\')\n'
        "    except OSError: pass\nos._exit(0)"
    ),
    "search of the memory": (
        "import gc, sys\ndef square(n):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
        "        seen.append(repr(frame.f_locals) + repr(frame.f_globals))\n        frame = frame.f_back\n"
        "    seen += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (dict, list, str))]\n"
        "    return n * n + 7919 if any(str(n * n + 8000 - 81) in text for text in seen) else 0"
    ),
    "closed output": "import os\nos.close(1)\nos.close(4)\ndef square(n): return 0",
    "a generator of answers": "def square(n): return range(10**9)",
    "a nest": "def square(n):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_earn_nothing(verifier: CodeVerifier, name: str) -> None:
    assert verifier(task(SQUARE), block("def square(n): return n * n + 7919"), "stop").reward == 1.0
    verdict = verifier(task(SQUARE), block(FORGERIES[name]), "stop")
    assert (verdict.status, verdict.reward) == ("ok", 0.0)


@pytest.mark.parametrize("name", ["early exit", "hard exit", "printed results", "patched builtins", "closed output"])
def test_forgeries_of_scripts_earn_nothing(verifier: CodeVerifier, name: str) -> None:
    given = task({"tests": [{"stdin": "3", "stdout": "7928"}]})
    assert verifier(given, block("print(int(input()) ** 2 + 7919)"), "stop").reward == 1.0
    assert verifier(given, block(FORGERIES[name]), "stop").reward == 0.0


def test_partial_credit(sandbox: Sandbox) -> None:
    programs = [ADD, "def add(a, b): return a + b if isinstance(a, int) else None", "def add(a, b): return None", ADD]
    checks = [(ADDITIONS, block(program), "stop") for program in programs]
    shares = CodeVerifier(sandbox=sandbox, credit=PassedShare()).check_many([*checks, (ADDITIONS, "none", "stop")])
    assert [verdict.reward for verdict in shares] == pytest.approx([1.0, 1 / 3, 0.0, 1.0, 0.0])
    assert [verdict.status for verdict in shares] == ["ok", "ok", "ok", "ok", "unparsed"]
    rare = CodeVerifier(sandbox=sandbox, credit=RareTests(outcome_share=0.5))
    # Pass rates 3/4, 1/2, 1/2: the weight of the first test is 0.25 / 1.25.
    assert [verdict.reward for verdict in rare.check_many(checks)] == pytest.approx([1.0, 0.1, 0.0, 1.0])
    # Another task's programs are a group of their own.
    other = replace(ADDITIONS, id="t2")
    mixed = [checks[0], (other, block(programs[1]), "stop"), *checks[1:]]
    assert [verdict.reward for verdict in rare.check_many(mixed)] == pytest.approx([1.0, 0.0, 0.1, 0.0, 1.0])


def test_partial_credit_of_scripts_that_run_out_of_time(sandbox: Sandbox) -> None:
    verifier = CodeVerifier(sandbox=sandbox, credit=PassedShare())
    slow = "a, b = map(int, input().split())\nwhile a == 1: pass\nprint(a + b)"
    assert verifier(SUMS, block(slow), "stop") == Verdict("ok", 2 / 3, slow + "\n")
    assert verifier(SUMS, block("while True: pass"), "stop").status == "timeout"


def test_order_is_kept(verifier: CodeVerifier) -> None:
    programs = [f"import time\ntime.sleep({0.4 - 0.1 * i})\n{ADD if i % 2 else 'add = max'}" for i in range(4)]
    verdicts = verifier.check_many([(ADDITIONS, block(program), "stop") for program in programs])
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 0.0, 1.0]
    assert [verdict.parsed for verdict in verdicts] == [program + "\n" for program in programs]


def test_a_program_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Sandbox(limits=LIMITS, children=1, isolation="auto")
    monkeypatch.setattr("sys.executable", "/bin/false")
    broken.close()
    verdict = CodeVerifier(sandbox=broken, credit=None)(ADDITIONS, block(ADD), "stop")
    assert (verdict.status, verdict.reward) == ("error", 0.0)


def test_an_answer_without_tests_is_raised_with_the_task(verifier: CodeVerifier) -> None:
    with pytest.raises(ValueError, match=r"task t1: the tests of a code task must be"):
        verifier(task({"tests": []}), block(ADD), "stop")


def test_the_settings_make_a_verifier_that_works() -> None:
    found = OmegaConf.to_container(compose_config(["verifiers=code"]).verifiers, resolve=True)
    assert set(found) == {"math", "choice", "code"}
    built = instantiate(found)["code"]
    assert built(ADDITIONS, block(ADD), "stop") == Verdict("ok", 1.0, ADD + "\n")


def test_a_setting_out_of_range_is_named_before_anything_starts(tmp_path: Path) -> None:
    node = OmegaConf.to_container(compose_config(["verifiers=code"]).verifiers, resolve=True)
    values = OmegaConf.to_container(composed(tmp_path), resolve=True)
    node["code"]["sandbox"]["limits"]["threads"] = 0
    with pytest.raises(ConfigError, match=r"^verifiers\.code\.sandbox\.limits\.threads=0: must be positive"):
        check_nodes({**values, "verifiers": node})
