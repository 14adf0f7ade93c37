"""Running a function on the ranks of a small torch.distributed job, and getting every rank's answer back.

A job is started as torchrun would start it: one process per rank, described by environment variables. The function
lives in a module of its own (``ranks_*.py``), takes picklable keyword arguments and returns something picklable.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 280.0


@dataclass
class Job:
    """The running processes of one job, in rank order, and the folder of their answers."""

    processes: list[subprocess.Popen[bytes]]
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


def start(ranks: int, function: str, folder: Path, **arguments: Any) -> Job:
    """Start ``function`` ("package.module:name") on all ranks; answers and output go to the new ``folder``."""
    folder.mkdir(parents=True)
    (folder / "arguments.pkl").write_bytes(pickle.dumps(arguments))
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    processes = []
    for rank in range(ranks):
        with (folder / f"{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.distributed", function, str(folder)],
                    env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return Job(processes, folder)


def run(ranks: int, function: str, folder: Path, **arguments: Any) -> list[Any]:
    """The answers of ``function`` on all ranks, in rank order."""
    return start(ranks, function, folder, **arguments).results()


def _rank(function: str, folder: Path) -> None:
    from spark_megatron import runtime

    runtime.prepare_environment()
    import torch

    torch.set_num_threads(1)
    runtime.start("gloo", TIMEOUT_S)
    module, _, name = function.partition(":")
    arguments = pickle.loads((folder / "arguments.pkl").read_bytes())
    answer = getattr(importlib.import_module(module), name)(**arguments)
    (folder / f"{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(answer))
    runtime.stop()


if __name__ == "__main__":
    _rank(sys.argv[1], Path(sys.argv[2]))
