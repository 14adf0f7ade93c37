"""A warm process: it has imported heavy libraries, has done nothing else, and forks where they are needed.

It ends with the process that started it, and its forks end with it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

READ_AT_IMPORT = ("CUDA_", "GOMP_", "HF_", "KMP_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH_", "TRANSFORMERS_")
"""Beginnings of the names of variables that the interpreter or a library reads only once."""

_PR_SET_PDEATHSIG = 1
"""Of prctl(2): which signal a process gets when its parent dies."""


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a fork can no longer change."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


class WarmProcess:
    """A warm process, seen from the one that starts it with a command.

    The program has to call ``serve`` with the connection whose file descriptor is its last argument.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this object lives)
        self._requests, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt from the keyboard is for the tests alone
            )
        atexit.register(self.end)

    def ask(self, request: Any) -> Any:
        """The answer of ``serve``; RuntimeError with the last output of the warm process when it is no longer there."""
        try:
            self._requests.send(request)
            return self._requests.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"the warm process ended with code {code}:\n{said}") from error

    def end(self) -> None:
        """End it and its forks."""
        self._process.kill()
        self._process.wait()


class Fork:
    """A running fork, with the methods of ``subprocess.Popen``."""

    def __init__(self, warm: WarmProcess, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._warm = warm
        self.returncode: int | None = None
        self.pid: int = warm.ask((list(arguments), log, dict(environment)))

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._warm.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, sent: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sent)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(requests: Connection, modules: Sequence[str]) -> list[str]:
    """Be a warm process with these modules. Returns only in the forks, each with its arguments, to go on with them."""
    session, server = os.getppid(), os.getpid()
    for module in modules:
        importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"an import of {', '.join(modules)} started a thread, which forks would not have")
    gc.freeze()  # forks need not look through all that was imported, least of all at their end: it takes a second
    while os.getppid() == session:
        if not requests.poll(1.0):
            continue
        try:
            request = requests.recv()
        except EOFError:
            break
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            requests.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        arguments, log, environment = request
        if pid := os.fork():
            requests.send(pid)
        else:
            requests.close()
            _refresh(server, log, environment)
            return list(arguments)
    sys.exit()


def _refresh(server: int, log: Path, environment: Mapping[str, str]) -> None:
    """Give up what a fork has from its parent: its output, variables, random numbers and a life of its own."""
    import numpy
    import torch

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        sys.exit("the warm process ended")
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    numpy.random.seed()  # python's own generator sees to itself
    torch.seed()
