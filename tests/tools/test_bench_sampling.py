"""The benchmarks of hand-over and sampling say all that they promise. How fast anything is is not tested."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests import distributed
from tests.conftest import ModelDirectory
from tools.bench import handoff, rollout
from tools.bench.engine import show

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(model_directory: ModelDirectory, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What each rank of a job measures, by the size of the job."""
    folder, model = tmp_path_factory.mktemp("bench"), model_directory("qwen2")
    function = "tests.tools.ranks_bench:hand_over"
    return {size: distributed.run(size, function, folder / str(size), model=model) for size in (1, 2)}


def test_hand_overs_between_stages_move_what_has_to_be_moved(ranks: dict[int, Any]) -> None:
    assert all(rank["received"] == rank["bound"] > 0 for rank in ranks[2])
    (alone,) = ranks[1]
    assert alone["received"] == alone["bound"] == 0
    assert alone["model_bytes"] > max(rank["received"] for rank in ranks[2])
    for rank in (alone, *ranks[2]):
        assert 0 < rank["own_s"] < rank["handoff_s"]
        assert 0 < rank["repack_s"] < rank["handoff_s"]
        assert rank["allowed"] > handoff.BUCKET


def test_figures_of_the_hand_over_come_from_both_jobs(ranks: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "job", lambda size, _: {"ranks": ranks[size]})
    found = handoff.measure(Namespace(repeats=3))
    (alone,) = ranks[1]
    assert found["bytes_vs_bound"] == 1.0
    assert found["handoff_vs_memcpy"] == alone["handoff_s"] / alone["memcpy_s"]
    assert found["peak_extra_vs_bucket"] == max(rank["peak"] / rank["allowed"] for rank in ranks[2])
    assert all(math.isfinite(found[name]) for name in handoff.DESCRIPTIONS)


def test_sampling_and_start_have_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = distributed.run(1, "tests.tools.ranks_bench:sampling", tmp_path / "job")
    assert all(found[name] > 0 for name in rollout.DESCRIPTIONS)
    parts = [found[name] for name in rollout.DESCRIPTIONS if name.startswith("start_") and name != "start_s"]
    assert sum(parts) == pytest.approx(found["start_s"])
    assert found["tokens"] <= 3 * 2 * 4
    show(found, rollout.DESCRIPTIONS)
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == found
    assert [line.split()[0] for line in table] == list(rollout.DESCRIPTIONS)


@pytest.mark.parametrize("program", ["handoff", "rollout"])
def test_a_missing_model_is_named(program: str) -> None:
    command = [sys.executable, f"tools/bench/{program}.py", "--model", "no/such/model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--model no/such/model has no config.json" in done.stderr
