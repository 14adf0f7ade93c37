from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.rewards import walls
from spark_megatron.rewards.launcher import Request
from spark_megatron.rewards.sandbox import Limits, Run, Sandbox, SandboxError
from tests.rewards.escapes import ENDED, HELD, LIMITS

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(limits=LIMITS, children=2, isolation="auto")
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def public_python() -> Iterator[Path]:
    """An interpreter and this package where every user can read them; the tests' own may lie in a private folder."""
    prefix, version = Path(sys.base_prefix), f"python{sysconfig.get_python_version()}"
    with tempfile.TemporaryDirectory() as folder:
        home, code = Path(folder), Path(folder, "code")
        home.chmod(0o755)
        unused = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "ensurepip", "config-*")
        shutil.copytree(prefix / "lib" / version, home / "lib" / version, ignore=unused, symlinks=True)
        for library in (prefix / "lib").glob("libpython*.so*"):
            shutil.copy(library, home / "lib", follow_symlinks=False)
        (home / "bin").mkdir()
        shutil.copy(Path(sys.executable).resolve(), home / "bin" / version)
        for name in ("spark_megatron/__init__.py", "spark_megatron/types.py", "tests/rewards/escapes.py"):
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, code / name)
        shutil.copytree(ROOT / "spark_megatron/rewards", code / "spark_megatron/rewards")
        yield home / "bin" / version


def as_user(user: int | None) -> dict[str, Any]:
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}


USERS = [pytest.param(None, id="this user"), *([pytest.param(NOBODY, id="nobody")] if os.geteuid() == 0 else [])]


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("isolation", ["namespaces", "filters"])
def test_nothing_gets_out_and_nothing_is_harmed(public_python: Path, isolation: str, user: int | None) -> None:
    code = public_python.parents[1] / "code"
    if isolation == "filters" and not walls.landlock_version():
        with pytest.raises(ValueError, match="no Landlock"):
            Sandbox(limits=LIMITS, children=1, isolation="filters")
        return
    done = subprocess.run(
        [public_python, code / "tests/rewards/escapes.py", isolation],
        env={"PYTHONPATH": str(code)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        **as_user(user),
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["held"] == dict.fromkeys(HELD, "held\n")
    assert found["ended"] == {name: end for name, (_, end) in ENDED.items()}
    assert found["same"]
    assert found["left"] == []


def test_a_program_is_the_main_module(sandbox: Sandbox) -> None:
    program = "import sys\nprint(__name__, sys.argv, input(), file=sys.stdout)\nprint('lost', file=sys.stderr)"
    assert sandbox.run(program, stdin="é 1\n") == Run("exit", 0, "__main__ ['program.py'] é 1\n")
    assert sandbox.run("import sys\nsys.exit(3)").code == 3
    assert sandbox.run("1 / 0").code == 1
    assert sandbox.run("def").code == 1
    assert sandbox.run("\ud800").code == 1
    assert sandbox.run("import os\nos.kill(os.getpid(), 15)").code == -signal.SIGTERM


def test_expressions_are_evaluated_in_order_and_failures_are_null(sandbox: Sandbox) -> None:
    program = "print('noise')\nx = []\ndef f(y):\n    x.append(y)\n    return len(x), {y: 1.5}"
    run = sandbox.run(program, expressions=["f('a')", "f(", "g()", "f('b')", "{f}", "__name__"])
    assert [json.loads(line) for line in run.output.splitlines()] == [
        [["tuple", [1, ["dict", [["a", 1.5]]]]]],
        None,
        None,
        [["tuple", [2, ["dict", [["b", 1.5]]]]]],
        [["set", [["other"]]]],
        ["program"],
    ]


def test_what_honest_programs_use_works(sandbox: Sandbox) -> None:
    program = """
from __future__ import annotations
import asyncio, collections, concurrent.futures, dataclasses, decimal, functools, heapq, itertools, math, random
import re, sys, threading, tempfile
@dataclasses.dataclass
class Point:
    x: int
async def later(): return await asyncio.sleep(0.01, 5)
def deep(n): return n and 1 + deep(n - 1)
def recurse():
    sys.setrecursionlimit(10**6)
    print(deep(50_000))
threading.stack_size(2**26)
worker = threading.Thread(target=recurse)
worker.start(); worker.join()
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(sum(pool.map(abs, [-1, 2])))
print(asyncio.run(later()), Point(3))
"""
    assert sandbox.run(program) == Run("exit", 0, "50000\n3\n5 Point(x=3)\n")


def test_own_files_can_be_written_and_are_gone_afterwards(sandbox: Sandbox) -> None:
    if sandbox.isolation != "namespaces":
        return  # nothing at all can be written there, which the escapes show
    program = "import os\nprint(os.listdir('.'))\nopen('x', 'w').write('y')\nprint(open('/tmp/x').read())"
    assert [sandbox.run(program).output for _ in range(2)] == ["[]\ny\n", "[]\ny\n"]


def test_order_is_kept_and_children_run_at_once_from_any_thread(sandbox: Sandbox) -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        found[number] = sandbox.run(f"import time\ntime.sleep(0.5)\nprint({number})").output

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number}\n" for number in range(4)}
    assert time.monotonic() - begin > 1.0  # two at a time


def test_output_is_kept_up_to_the_limit_and_read_to_the_end(sandbox: Sandbox) -> None:
    most = LIMITS.output_kib * 1024
    assert sandbox.run(f"print('x' * {most - 1})") == Run("exit", 0, "x" * (most - 1) + "\n")
    assert sandbox.run(f"print('x' * {most})").end == "output"


def test_a_launcher_that_dies_is_an_error_and_the_next_run_works() -> None:
    with_one = Sandbox(limits=LIMITS, children=1, isolation="auto")
    launcher = with_one._launchers.get()
    with_one._launchers.put(launcher)
    process = launcher._process
    assert process is not None
    threading.Timer(0.5, process.kill).start()
    with pytest.raises(SandboxError, match="ended with code -9"):
        with_one.run("import time\ntime.sleep(5)")
    assert with_one.run("print(1)").output == "1\n"
    with_one.close()


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def running_under(pid: int) -> list[int]:
    """All descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, todo = [], [pid]
    while todo:
        below = [child for child, parent in parents.items() if parent == todo[0]]
        found, todo = found + below, todo[1:] + below
    return found


def test_programs_end_with_the_process_that_wanted_them() -> None:
    source = (
        "from tests.rewards.escapes import LIMITS\nfrom spark_megatron.rewards.sandbox import Sandbox\n"
        "sandbox = Sandbox(limits=LIMITS, children=1, isolation='auto')\nprint(flush=True)\n"
        "sandbox.run('import time\\ntime.sleep(1000)')"
    )
    user = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)})
    assert user.stdout is not None
    user.stdout.readline()
    deadline = time.monotonic() + 4.0
    while len(running_under(user.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    started = running_under(user.pid)
    assert len(started) == 2  # the launcher and the program
    user.kill()
    user.wait()
    user.stdout.close()
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_where_nothing_shuts_programs_in_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = replace(LIMITS, memory_mib=1)
    with pytest.raises(ValueError, match=r"isolation='auto': .*namespaces: .*filters: .*isolation=\"none\""):
        Sandbox(limits=tight, children=1, isolation="auto")


def test_without_isolation_only_on_request_and_loudly(caplog: pytest.LogCaptureFixture) -> None:
    open_box = Sandbox(limits=LIMITS, children=1, isolation="none")
    assert "WITHOUT isolation" in caplog.text
    assert open_box.run("import os\nprint(len(os.listdir('/proc')) > 10)").output == "True\n"
    assert open_box.run("while True: pass").end == "timeout"
    assert open_box.run("x = bytearray(2**30)").code == 1
    forked = "import os, time\nif os.fork() == 0: time.sleep(1000)\nprint(os.getpgid(0))"
    done = open_box.run(forked)
    assert done.end == "exit"
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and group_exists(int(done.output)):
        time.sleep(0.05)
    assert not group_exists(int(done.output))
    open_box.close()


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="children=0"):
        Sandbox(limits=LIMITS, children=0, isolation="auto")
    with pytest.raises(ValueError, match=r"isolation='docker': must be one of \['auto', 'namespaces'"):
        Sandbox(limits=LIMITS, children=1, isolation="docker")  # type: ignore[arg-type]
    for name in ("cpu_seconds", "wall_seconds", "memory_mib", "disk_mib", "threads", "open_files", "output_kib"):
        with pytest.raises(ValueError, match=f"{name}=0: must be positive"):
            replace(LIMITS, **{name: 0})


def test_the_filter_knows_both_machines_and_no_other() -> None:
    for machine in ("x86_64", "aarch64"):
        code = walls.filter_code(machine, 4242)
        assert len(code) % 8 == 0
        assert len(code) // 8 <= 4096  # what the kernel takes
    with pytest.raises(OSError, match="riscv64"):
        walls.filter_code("riscv64", 1)


def test_a_request_carries_all_limits() -> None:
    names = set(Request.__dataclass_fields__) - {"isolation", "program", "stdin", "expressions"}
    assert names == set(Limits.__dataclass_fields__)
