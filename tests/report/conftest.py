"""Run directories as a training leaves them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_megatron.report.report import Report, make_report

KINDS = ("solve", "judge_one", "judge_pair", "reflect")


def metrics_row(step: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "time": 1000.0 + 4 * step}
    for kind in KINDS:
        row |= {f"reward/{kind}": step / 20, f"length/{kind}": 100.0 - step, f"status/{kind}/ok": 15}
        row[f"status/{kind}/unparsed"] = 1
    row |= {"policy/kl": 0.01 * step, "policy/entropy": 2 / step, "policy/grad_norm": 1.0, "policy/loss": None}
    row |= {"mismatch/max_abs": 1e-5 * step, "mismatch/mean_abs": 1e-6, "weights/policy": 0.4, "weights/kl": 0.1}
    row |= {"mismatch/effective_share": 0.99, "mismatch/outside_share": 0.01, "mismatch/rejected_share": 0.02}
    row |= {"judge_one/accuracy_right": 0.7, "judge_one/accuracy_wrong": 0.6, "judge_one/yes_rate": 0.55}
    row |= {"judge_pair/accuracy_first": 0.7, "judge_pair/accuracy_second": 0.5, "judge_pair/position_bias": 0.2}
    row |= {f"{kind}/{name}": 0.1 for kind in ("judge_one", "judge_pair") for name in ("ece", "brier")}
    row |= {"time/rollout": 2.0, "time/update": 1.0, "time/other": 1.0, "time/step": 4.0, "time/eta": 8.0}
    return row | {"tokens/generated": 1000, "tokens/per_s": 250.0, "memory/peak_rss_gb": 1.5 + 0.01 * step}


def rollout(text: str, reward: float, status: str = "ok") -> dict[str, Any]:
    return {"text": text, "reward": reward, "status": status, "parsed": None, "finish": "stop", "length": len(text)}


def write_run(parent: Path) -> Path:
    """A finished run of 12 steps, with everything that a report can use."""
    directory = parent / "spark_tiny"
    directory.mkdir()
    rows = [metrics_row(step) for step in range(1, 13)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = [
        {
            "step": step,
            "kind": kind,
            "prompt": f"{kind} <question> & so on",
            "answer": "72",
            "weight_version": step,
            "rollouts": [rollout(f"right {kind} {step}", 1.0), rollout("<script>alert(1)</script>", 0.0, "unparsed")],
        }
        for step in range(1, 13)
        for kind in KINDS
    ]
    (directory / "rollouts.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    part = {kind: {"acc": 0.25, "ci": [0.15, 0.35], "n": 80} for kind in KINDS}
    after = {kind: {"acc": 0.75, "ci": [0.65, 0.85], "n": 80} for kind in KINDS}
    (directory / "eval.json").write_text(json.dumps({"before": part, "after": {**after, "counts": {"ok": 320}}}))
    config = {
        "name": "spark_tiny",
        "seed": 17,
        "model": {"path": "models/tiny", "dtype": "fp32"},
        "parallel": {"ranks": 2, "tensor": 2},
        "trainer": {"loop": {"_target_": "a.b.train"}, "total_steps": 60},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run directory to change at will."""
    return write_run(tmp_path)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of an unchanged run directory, made once."""
    return make_report(write_run(tmp_path_factory.mktemp("whole")))


@pytest.fixture
def sft_directory(tmp_path: Path) -> Path:
    """A supervised run of 30 steps: metrics alone."""
    directory = tmp_path / "sft"
    directory.mkdir()
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, 31):
            row = {"step": step, "time": 2.0 * step, "sft/loss": 1 + math.exp(-step / 9), "sft/grad_norm": 1.0}
            row |= {"sft/lr": 1e-5, "time/step": 2.0, "tokens/per_s": 12000.0, "extra/unknown": step * 0.5}
            file.write(json.dumps(row) + "\n")
    return directory


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[Any], Any]], None]:
    """Changes a JSON file in place."""

    def edit(path: Path, change: Callable[[Any], Any]) -> None:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return edit
