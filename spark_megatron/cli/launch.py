"""The launcher: check the settings, make the run directory, start the ranks, report how they ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from importlib.metadata import version
from pathlib import Path

from spark_megatron.cli.compose import load, write_resolved
from spark_megatron.config import ConfigError

PACKAGES = ("torch", "megatron-core", "transformers", "hydra-core")


def make_run_dir(path: Path) -> None:
    """A fresh, writable directory; ConfigError where one with results already exists."""
    if (path / "metrics.jsonl").exists():
        raise ConfigError(f"run_dir={path} already holds a run: choose another run_dir or remove it")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={path} cannot be made ({error.strerror}): choose a writable directory") from error


def provenance() -> dict[str, object]:
    """Git revision (None outside a checkout) and versions of what the numbers depend on."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    versions = {name: version(name) for name in PACKAGES}
    return {"git": git.stdout.strip() or None, "python": sys.version.split()[0], "packages": versions}


def launch(overrides: list[str]) -> int:
    """Run the job to its end; returns the exit code (0 when every rank succeeded)."""
    composed, config = load(overrides)
    run_dir = Path(config.run_dir).absolute()
    make_run_dir(run_dir)
    write_resolved(composed, run_dir)
    (run_dir / "provenance.json").write_text(json.dumps(provenance(), indent=2) + "\n")
    print(f"{config.name}: {config.parallel.ranks} ranks, results in {run_dir}", file=sys.stderr, flush=True)
    code = _start_ranks([*overrides, f"run_dir={run_dir}"], config.parallel.ranks)
    if code == 0:
        print(f"done: open {run_dir / 'report.html'}", file=sys.stderr)
    return code


def _start_ranks(arguments: list[str], ranks: int) -> int:
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
        elastic_launch(settings, sys.executable)("-m", "spark_megatron.cli.train", *arguments)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        message = first.message["message"] if isinstance(first.message, dict) else first.message
        print(f"spark-train: rank {rank} failed first (exit code {first.exitcode}): {message}", file=sys.stderr)
        return 1
    except (SignalException, KeyboardInterrupt) as error:
        print(f"spark-train: stopped ({error}); what was logged so far is in the run directory", file=sys.stderr)
        return 130
    return 0
