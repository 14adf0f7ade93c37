"""The launcher: check the settings, start the ranks, report how they ended."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path

from spark_megatron import runtime
from spark_megatron.cli import resume
from spark_megatron.cli.compose import load
from spark_megatron.cli.run_dir import reserve


def launch(overrides: list[str]) -> int:
    """Run the job to its end; returns the exit code (0 when every rank succeeded)."""
    _, config = load(overrides)
    run_dir = Path(config.run_dir).absolute()
    start = resume.plan(replace(config, run_dir=str(run_dir)))
    if start.finished:
        print(start.message, file=sys.stderr)
        return 0
    reserve(run_dir)
    print(f"{config.name}: {config.parallel.ranks} ranks, results in {run_dir}", file=sys.stderr, flush=True)
    code = start_ranks("train", [*overrides, f"run_dir={quoted(run_dir)}"], config.parallel.ranks)
    if code == 0:
        print(f"done: open {run_dir / 'report.html'}", file=sys.stderr)
    else:
        print(f"the same command with run_dir={run_dir} goes on from the last checkpoint", file=sys.stderr)
    return code


def quoted(path: Path) -> str:
    """The path as a quoted text of Hydra's override grammar: it may hold commas, spaces and equals signs."""
    escaped = str(path).replace("'", "\\'")
    return f"'{escaped}'"


def start_ranks(command: str, arguments: list[str], ranks: int) -> int:
    """Run ``spark_megatron.cli.<command>`` on that many ranks of this machine; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.5,
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        elastic_launch(settings, sys.executable)("-m", f"spark_megatron.cli.{command}", *arguments)
    except ChildFailedError as error:
        # torch dates a killed rank by when it noticed that, which may be after the errors that this caused in others.
        # A rank that its deadline ended kept the others waiting, who may have given up in the same second.
        causes = (-signal.SIGKILL, runtime.HUNG)
        rank, first = min(error.failures.items(), key=lambda f: (f[1].exitcode not in causes, f[1].timestamp))
        message = first.message["message"] if isinstance(first.message, dict) else first.message
        print(f"spark-{command}: rank {rank} failed first (exit code {first.exitcode}): {message}", file=sys.stderr)
        return 1
    except (SignalException, KeyboardInterrupt) as error:
        print(f"spark-{command}: stopped ({error})", file=sys.stderr)
        return 130
    return 0
