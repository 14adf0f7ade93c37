"""Running a function on the ranks of a small torch.distributed job, and getting every rank's answer back.

A job is started as torchrun would start it: one process per rank, described by environment variables. The function
lives in a module of its own (``ranks_*.py``), takes picklable keyword arguments and returns something picklable.

A rank is a fork of the warm process (``tests/warm.py``), which spares it ten seconds of imports, or a fresh interpreter
where a fork would be something else: ``warm=False``, a GPU, changed variables that a library reads when it is imported.
Forks share one seed of string hashes, fresh interpreters do not.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from spark_megatron import runtime
from tests.warm import Fork, WarmProcess, read_at_import, serve

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 280.0
PRELOADED = ("transformers.models.auto.modeling_auto", "spark_megatron.engine.engine")
"""Without vLLM, which changes torch for the whole process."""

COMMAND = [sys.executable, "-m", "tests.distributed"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
"""As it is before any test changes it."""


@dataclass
class Job:
    """The running processes of one job, in rank order, and the folder of their answers."""

    processes: list[Fork | subprocess.Popen[bytes]]
    folder: Path

    def results(self) -> list[Any]:
        """Every rank's answer, in rank order. RuntimeError with the rank's last output when one of them fails."""
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while any(process.poll() is None for process in self.processes):
                self._raise_failure()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer after {TIMEOUT_S:.0f} s; rank 0 said:\n{self._output(0)}")
                time.sleep(0.05)
            self._raise_failure()
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return [pickle.loads((self.folder / f"{rank}.pkl").read_bytes()) for rank in range(len(self.processes))]

    def _raise_failure(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll():
                raise RuntimeError(f"rank {rank} ended with code {process.returncode}:\n{self._output(rank)}")

    def _output(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text(errors="replace")[-4000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@functools.cache
def warm_process() -> WarmProcess:
    return WarmProcess([*COMMAND, "--warm"], ENVIRONMENT, ROOT)


def start(ranks: int, function: str, folder: Path, *, warm: bool = True, **arguments: Any) -> Job:
    """Start ``function`` ("package.module:name") on all ranks; answers and output go to the new ``folder``."""
    folder.mkdir(parents=True)
    (folder / "arguments.pkl").write_bytes(pickle.dumps(arguments))
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    warm = warm and not runtime.has_gpu() and read_at_import(environment) == read_at_import(ENVIRONMENT)
    process = _forked if warm else _fresh
    processes = []
    for rank in range(ranks):
        log = folder / f"{rank}.log"
        log.touch()
        processes.append(
            process([function, str(folder)], log, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        )
    return Job(processes, folder)


def _forked(arguments: list[str], log: Path, environment: Mapping[str, str]) -> Fork:
    return Fork(warm_process(), arguments, log, environment)


def _fresh(arguments: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [*COMMAND, *arguments], env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )


def run(ranks: int, function: str, folder: Path, **arguments: Any) -> list[Any]:
    """The answers of ``function`` on all ranks, in rank order."""
    return start(ranks, function, folder, **arguments).results()


def _rank(function: str, folder: str) -> None:
    runtime.prepare_environment()
    import torch

    torch.set_num_threads(1)
    runtime.start("gloo", TIMEOUT_S)
    module, _, name = function.partition(":")
    arguments = pickle.loads(Path(folder, "arguments.pkl").read_bytes())
    answer = getattr(importlib.import_module(module), name)(**arguments)
    Path(folder, f"{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(answer))
    runtime.stop()


def _warm(descriptor: str) -> list[str]:
    runtime.prepare_environment()
    return serve(Connection(int(descriptor)), PRELOADED)


if __name__ == "__main__":
    _rank(*(_warm(sys.argv[2]) if sys.argv[1] == "--warm" else sys.argv[1:]))
