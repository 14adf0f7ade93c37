"""Whole runs through the command line, on the real engines and the shipped start model."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SMALL = ("trainer.tasks_per_step=16", "eval.items=20", "trainer.max_tokens_per_microbatch=2048")
SCRIPTED = ("rollout=scripted", *SMALL)
WHOLE = (
    "experiment=spark_tiny", "trainer.total_steps=4", "objective.updates_per_period=1", "optim.warmup_updates=2",
    "kl_schedule=adaptive", "checkpoint.every=2", "checkpoint.keep=9", "checkpoint.asynchronous=false",
    "tracking.record_groups=64", "tracking.wandb=offline", *SMALL,
)  # fmt: skip
"""The settings of the fixture ``whole``."""


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spark_megatron.cli.train", f"run_dir={run_dir}", *overrides]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """Run to the end and return the rows of metrics.jsonl."""
    process = start(run_dir, *overrides)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-4000:]
    return rows(run_dir)


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def children(pid: int) -> list[int]:
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in out.split()]
