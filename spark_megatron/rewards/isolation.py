"""Slow checks in a process of their own, under limits of time and memory that work from any thread."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class CheckTimeout(Exception):
    """A check did not end within its time."""


class CheckCrash(Exception):
    """The process of a check died."""


class SymbolicChecker:
    """Asks a worker process whether two mathematical answers are equal.

    The worker starts with the first question and again after a timeout or crash; it ends with this process.
    ``timeout_seconds`` limits one comparison, ``start_seconds`` the worker's start, ``memory_gib`` its address space.
    """

    def __init__(self, *, timeout_seconds: float, start_seconds: float, memory_gib: float) -> None:
        for name, value in (("timeout_seconds", timeout_seconds), ("start_seconds", start_seconds)):
            if value <= 0:
                raise ValueError(f"{name}={value}: must be positive")
        self._timeout, self._start_timeout, self._memory_gib = timeout_seconds, start_seconds, memory_gib
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, gold: str, answer: str) -> bool:
        """Whether the answers are mathematically equal; raises CheckTimeout or CheckCrash, and the next call works."""
        with self._lock:
            worker = self._running()
            assert worker.stdin is not None
            try:
                worker.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
                worker.stdin.flush()
                reply = _read_line(worker, self._timeout)
            except BrokenPipeError as error:
                self._stop()
                raise CheckCrash(f"comparing {gold[:80]!r} with {answer[:80]!r}") from error
            except (CheckTimeout, CheckCrash):
                self._stop()
                raise
            return reply == "equal"

    def close(self) -> None:
        """Ends the worker; a later question starts another."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            self._stop()
            path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
            worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "spark_megatron.rewards.symbolic", str(self._memory_gib)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            weakref.finalize(self, _end, worker)
            self._worker = worker
            try:
                _read_line(worker, self._start_timeout)
            except (CheckTimeout, CheckCrash) as error:
                self._stop()
                raise RuntimeError(
                    f"the process for symbolic checks did not start within start_seconds={self._start_timeout}: "
                    "see its message above, or raise start_seconds or memory_gib"
                ) from error
        assert self._worker is not None
        return self._worker

    def _stop(self) -> None:
        if self._worker is not None:
            _end(self._worker)
            self._worker = None


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None and not pipe.closed:
            _close(pipe)


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return  # a question that a killed worker never read was still buffered


def _read_line(worker: subprocess.Popen[bytes], seconds: float) -> str:
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], seconds)
    if not ready:
        raise CheckTimeout(f"no reply within {seconds} s")
    line = worker.stdout.readline()
    if not line:
        raise CheckCrash(f"the worker ended with code {worker.wait()}")
    return line.decode().strip()
