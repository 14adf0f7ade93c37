"""What the ranks of the resume tests run: whole runs one after the other, with scripted responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spark_megatron import runtime
from spark_megatron.cli import resume, run_dir
from spark_megatron.cli.compose import load
from spark_megatron.trainers.run import run


def runs(starts: Sequence[tuple[str, ...]]) -> list[str]:
    """Each start is a list of overrides; the answer is what it said about where it begins."""
    return [_start(overrides) for overrides in starts]


def _start(overrides: Sequence[str]) -> str:
    from megatron.core import parallel_state

    composed, config = load(list(overrides))
    config = replace(config, run_dir=str(Path(config.run_dir).absolute()))
    start = resume.plan(config)
    if not start.finished:
        if runtime.rank() == 0:
            run_dir.prepare(Path(config.run_dir), composed)
        run(config, start.checkpoint)
        parallel_state.destroy_model_parallel()
    return start.message
