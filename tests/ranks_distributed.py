"""What the ranks of the harness's own tests run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import torch

from spark_megatron import runtime


def facts(variable: str) -> dict[str, Any]:
    """What a rank has from the process that started it, and what it can start itself."""
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.list([runtime.rank()])
        shared.append(os.getpid())
        managed = list(shared)
    return {
        "ranks": runtime.gather(runtime.rank()),
        "variable": os.environ.get(variable),
        "directory": Path.cwd(),
        "handlers": {sent: str(signal.getsignal(sent)) for sent in signal.valid_signals()},
        "files": open_files(),
        "threads": threading.active_count(),
        "torch_threads": torch.get_num_threads(),
        "managed": managed == [runtime.rank(), os.getpid()],
        "drawn": (random.random(), float(numpy.random.rand()), float(torch.rand(1))),
    }


def open_files() -> list[str]:
    """The names of the files that this process has open; of sockets, pipes and the like only the kind."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]  # not that of the listing itself
    return sorted(Path(os.readlink(link).split(":")[0]).name for link in links)


def open_ended(failing: int) -> None:
    """Says that it is there; then the failing rank raises, the others wait without end."""
    print(f"rank {runtime.gather(runtime.rank())[runtime.rank()]} is there", flush=True)
    if runtime.rank() == failing:
        raise ValueError("as was asked for")
    time.sleep(1000)
