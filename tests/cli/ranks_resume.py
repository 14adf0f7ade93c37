"""Whole runs one after the other, in ranks that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from spark_megatron import runtime
from spark_megatron.cli.compose import load
from spark_megatron.cli.train import begin
from spark_megatron.schema import ConfigError
from spark_megatron.trainers.run import run


def runs(starts: Sequence[tuple[str, ...]]) -> list[str]:
    """Each start is a list of overrides; the answer is what it said about where it begins, or why not."""
    return [_start(overrides) for overrides in starts]


def _start(overrides: Sequence[str]) -> str:
    from megatron.core import parallel_state

    composed, config = load(list(overrides))
    config = replace(config, run_dir=str(Path(config.run_dir).absolute()))
    try:
        start = runtime.decided_by_zero(partial(begin, config, composed), ConfigError)
    except ConfigError as refusal:
        return str(refusal)
    if not start.finished:
        run(config, start.checkpoint)
        parallel_state.destroy_model_parallel()
    return start.message
