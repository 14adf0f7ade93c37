"""The engine's benchmark: it runs on a tiny model and says all that it promises. How fast anything is is not tested."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_megatron.engine.model import read_config
from tools.bench import engine

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a program, for it sets the number of threads of its process."""
    command = [sys.executable, "tools/bench/engine.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_last_line_has_every_figure(model_directory: Callable[[str], Path]) -> None:
    model = model_directory("qwen3")
    done = run("--model", str(model), "--dtype", "fp32", "--tokens", "64", "--steps", "1", "--threads", "1")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    figures = {name: found[name] for name in engine.DESCRIPTIONS}
    assert all(math.isfinite(value) for value in figures.values()), figures
    assert [line.split()[0] for line in table[-len(figures) :]] == list(figures)
    assert (found["model"], found["dtype"], found["threads"]) == (str(model), "fp32", 1)
    for name in ("train_vs_hf", "train_vs_hf_full", "mfu", "mfu_hf", "load_s", "ckpt_stall_s", "ckpt_sync_s"):
        assert found[name] > 0, name
    assert found["mfu"] / found["mfu_hf"] == pytest.approx(found["mfu_vs_hf"])


def test_a_missing_model_is_named() -> None:
    done = run("--model", "no/such/model")
    assert done.returncode == 2
    assert "--model no/such/model has no config.json" in done.stderr


def test_model_flops_take_head_dim_and_vocabulary_from_the_config(model_directory: Callable[[str], Path]) -> None:
    """Qwen3 with heads of 32 though hidden / heads is 16, counted by hand for sequences of 3 and 5 tokens."""
    hf = read_config(model_directory("qwen3"))
    layer = 64 * 32 * (4 + 2 + 2 + 4) + 3 * 64 * 160
    forward = 2 * (4 * layer + 301 * 64) * 8 + 4 * 4 * (2 * 32) * (3 * 3 + 5 * 5)
    assert engine.model_flops(hf, [3, 5]) == 3 * forward


@pytest.mark.parametrize("tokens", [32, 257, 1024])
def test_ragged_lengths_add_up(tokens: int) -> None:
    longest = min(engine.LONGEST, tokens // 4)
    lengths = engine.ragged_lengths(tokens, longest, random.Random(1))
    assert sum(lengths) == tokens
    assert max(lengths) == longest
    assert min(lengths) >= longest // 8
