"""Runs programs that nobody trusts: isolated, limited, several at once."""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from spark_megatron.rewards.launcher import Isolation, Request

_LOG = logging.getLogger(__name__)
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 60.0
"""What a launcher may take on top of a program's own time, on a machine under load."""


class SandboxError(Exception):
    """A program could not be run; it says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use.

    ``cpu_seconds`` counts its work and ``wall_seconds`` the time that passes (waiting, or a busy machine, counts too);
    ``memory_mib`` is address space, ``disk_mib`` what it may write to its ``/tmp``, ``threads`` includes the first one,
    ``output_kib`` what it may print. There is always one process only.
    """

    cpu_seconds: int
    wall_seconds: float
    memory_mib: int
    disk_mib: int
    threads: int
    open_files: int
    output_kib: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name}={value}: must be positive")


@dataclass(frozen=True)
class Run:
    """How a run ended: by itself ("exit", with its exit code, negative for a signal) or by a limit."""

    end: Literal["exit", "timeout", "output"]
    code: int
    output: str
    """What it printed; one line of JSON per expression where it was given some."""


class Sandbox:
    """Runs Python programs (standard library only) with a new interpreter each, ``children`` at once, from any thread.

    ``isolation`` is what keeps a program in: "namespaces" (a file system and network of its own), "filters" (it may
    read the interpreter's files and write nothing; Landlock), "auto" (the first of the two that works here) or "none":
    limits alone, for programs that are trusted or where a container around everything does the work. In both of the
    real ones it cannot make processes, open sockets, send signals or see other processes, has a clean environment, and
    is not root. A launcher process per child starts the programs; one that fails is replaced.

    Raises:
        ValueError: the isolation does not work on this machine, with the reasons.
    """

    def __init__(self, *, limits: Limits, children: int, isolation: Literal["auto", Isolation]) -> None:
        if children < 1:
            raise ValueError(f"children={children}: must be at least 1")
        if isolation not in ("auto", *get_args(Isolation)):
            raise ValueError(f"isolation={isolation!r}: must be one of {['auto', *get_args(Isolation)]}")
        self.children, self._limits = children, limits
        self._launchers: queue.SimpleQueue[_Launcher] = queue.SimpleQueue()
        for _ in range(children):
            self._launchers.put(_Launcher())
        self.isolation = self._working(isolation)

    def run(self, program: str, *, stdin: str = "", expressions: Sequence[str] | None = None) -> Run:
        """Runs ``program`` as the main module, or imports it and evaluates ``expressions`` in its namespace.

        Raises:
            SandboxError: it could not be started, or its launcher died.
        """
        return self._run(self.isolation, program, stdin, expressions)

    def close(self) -> None:
        """Ends the launchers that are not at work; the next run starts new ones."""
        for _ in range(self._launchers.qsize()):
            launcher = self._launchers.get()
            launcher.stop()
            self._launchers.put(launcher)

    def _working(self, wanted: Literal["auto", Isolation]) -> Isolation:
        candidates: list[Isolation] = ["namespaces", "filters"] if wanted == "auto" else [wanted]
        reasons = []
        for isolation in candidates:
            try:
                done = self._run(isolation, "print(6 * 7)", "", None)
            except SandboxError as error:
                reasons.append(f"{isolation}: {error}")
                continue
            if (done.end, done.code, done.output) == ("exit", 0, "42\n"):
                if isolation == "none":
                    _LOG.warning("programs run WITHOUT isolation: they can read and change what this user can")
                return isolation
            reasons.append(f"{isolation}: a first program ended with {done}; are the limits too low?")
        raise ValueError(
            f"isolation={wanted!r}: programs cannot be shut in on this machine ({'; '.join(reasons)}). Allow user "
            "namespaces or Landlock, keep the interpreter where every user can read it, or, where a container around "
            'everything is isolation enough, set isolation="none"'
        )

    def _run(self, isolation: Isolation, program: str, stdin: str, expressions: Sequence[str] | None) -> Run:
        listed = None if expressions is None else list(expressions)
        request = Request(isolation, program, stdin, listed, **asdict(self._limits))
        launcher = self._launchers.get()
        try:
            reply = launcher.ask(request)
        finally:
            self._launchers.put(launcher)
        if reply["end"] == "setup":
            raise SandboxError(reply["reason"])
        return Run(reply["end"], reply["code"], base64.b64decode(reply["output"]).decode(errors="replace"))


class _Launcher:
    """A launcher process, started with the first request and again after a failure. One request at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Request) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            process.stdin.flush()
            return dict(json.loads(_read_line(process, request.wall_seconds + _START_SECONDS)))
        except (BrokenPipeError, json.JSONDecodeError) as error:
            self.stop()
            raise SandboxError(f"the launcher of programs failed: {error}") from error
        except SandboxError:
            self.stop()
            raise

    def stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-S", "-m", "spark_megatron.rewards.launcher"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"PYTHONPATH": str(_PACKAGE_ROOT), "PATH": os.defpath},
                start_new_session=True,
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a launcher with whatever runs under it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # a request that it never read was still buffered


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    assert process.stdout is not None
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise SandboxError(f"no reply from the launcher of programs within {seconds} s")
        part = os.read(process.stdout.fileno(), 1 << 20)
        if not part:
            raise SandboxError(f"the launcher of programs ended with code {process.wait()}")
        line += part
    return line
