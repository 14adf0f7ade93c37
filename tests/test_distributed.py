"""The harness of the distributed tests: its warm ranks are like fresh ones, and none of them outlives its job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import distributed
from tests.distributed import ENVIRONMENT, ROOT, Job
from tests.warm import Fork, WarmProcess

FACTS = "tests.ranks_distributed:facts"
OPEN_ENDED = "tests.ranks_distributed:open_ended"

SERVE = """
import sys, time
from multiprocessing.connection import Connection
from tests import warm
if warm.serve(Connection(int(sys.argv[2])), sys.argv[1:2]):
    time.sleep(1000)
"""

SESSION = """
import os, sys, time
from pathlib import Path
from tests.warm import Fork, WarmProcess
warm = WarmProcess([sys.executable, *sys.argv[2:]], os.environ, Path.cwd())
print(Fork(warm, ["run"], Path(sys.argv[1]), os.environ).pid, flush=True)
time.sleep(1000)
"""


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Any) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("facts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_THIS_TEST", "yes")
        jobs = {
            kind: distributed.start(2, FACTS, folder / kind, warm=kind != "fresh", variable="OF_THIS_TEST")
            for kind in ("warm", "again", "fresh")
        }
        assert all(
            isinstance(process, Fork) == (kind != "fresh") for kind, job in jobs.items() for process in job.processes
        )
        found = {kind: job.results() for kind, job in jobs.items()}
    return found


def test_a_warm_rank_is_like_a_fresh_one(facts: dict[str, list[dict[str, Any]]]) -> None:
    """The same working directory, variables, signal handlers, open files and threads; it can start processes too."""
    for rank, (warm, fresh) in enumerate(zip(facts["warm"], facts["fresh"], strict=True)):
        assert warm["ranks"] == [0, 1]
        assert warm["variable"] == "yes"
        assert warm["managed"]
        assert {k: v for k, v in warm.items() if k != "drawn"} == {k: v for k, v in fresh.items() if k != "drawn"}, rank


def test_no_two_ranks_draw_the_same(facts: dict[str, list[dict[str, Any]]]) -> None:
    """From the generators of python, numpy and torch."""
    drawn = zip(*(rank["drawn"] for answers in facts.values() for rank in answers), strict=True)
    assert [len(set(of_one_generator)) for of_one_generator in drawn] == [6, 6, 6]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return distributed.start(2, OPEN_ENDED, tmp_path / "job", failing=2)


def test_a_killed_rank_is_named_and_ends_the_job(job: Job) -> None:
    assert eventually(lambda: all((job.folder / f"{rank}.log").read_text() for rank in (0, 1)))
    first, second = job.processes
    second.kill()
    assert second.wait(timeout=60) == second.poll() == second.returncode == -signal.SIGKILL
    assert (first.poll(), first.returncode) == (None, None)
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(timeout=0.05)
    with pytest.raises(RuntimeError, match="rank 1 ended with code -9:\nrank 1 is there"):
        job.results()
    assert not alive(first.pid)
    first.kill()


def test_a_rank_that_raises_is_named_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match="(?s)rank 1 ended with code 1:\nrank 1 is there\n.*ValueError: as was asked for"
    ):
        distributed.run(2, OPEN_ENDED, tmp_path / "job", failing=1)


def test_a_variable_that_is_read_at_import_needs_fresh_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    job = distributed.start(1, OPEN_ENDED, tmp_path / "job", failing=1)
    assert not isinstance(job.processes[0], Fork)
    job.processes[0].kill()
    assert job.processes[0].wait() == -signal.SIGKILL


def test_forks_end_with_the_session_however_it_ends(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    command = [sys.executable, "-c", SESSION, str(tmp_path / "log"), "-c", SERVE, "torch"]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        fork = int(session.stdout.readline())
        warm = int(Path(f"/proc/{fork}/stat").read_text().rpartition(")")[2].split()[1])
        assert alive(fork)
        assert alive(warm)
        session.kill()
    assert eventually(lambda: not alive(warm))
    assert eventually(lambda: not alive(fork))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started a thread"),
    ],
)
def test_a_warm_process_that_cannot_serve_says_why(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "imported.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    warm = WarmProcess([sys.executable, "-c", SERVE, "imported"], environment, ROOT)
    with pytest.raises(RuntimeError, match=f"(?s)the warm process ended with code 1:.*{message}"):
        warm.ask(1)
