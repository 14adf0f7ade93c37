"""File sinks, read back by readers of their own."""

import json
import math
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spark_megatron.tracking.jsonl import read_steps
from spark_megatron.tracking.sinks import JsonlSink, TensorboardSink


def test_jsonl_sink_writes_one_strict_object_per_step(tmp_path: Path) -> None:
    sink = JsonlSink(path=tmp_path / "metrics.jsonl")
    before = time.time()
    sink.log(1, {"policy/kl": 0.25, "policy/loss": math.nan, "policy/ratio_mean": math.inf})
    sink.log(2, {"policy/kl": 0.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # not closed: as after a kill

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert rows[0] | {"time": 0} == {
        "step": 1,
        "time": 0,
        "policy/kl": 0.25,
        "policy/loss": None,
        "policy/ratio_mean": None,
    }
    assert before - 1 < rows[0]["time"] < time.time() + 1
    sink.record(2, "solve", [])
    sink.close()
    assert [row["policy/kl"] for row in read_steps(tmp_path / "metrics.jsonl")] == [0.25, 0.5]


def test_tensorboard_sink(tmp_path: Path) -> None:
    sink = TensorboardSink(directory=tmp_path)
    sink.log(1, {"reward/solve": 0.25, "policy/loss": math.nan})
    sink.log(2, {"reward/solve": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["reward/solve"]
    assert [(e.step, e.value) for e in events.Scalars("reward/solve")] == [(1, 0.25), (2, 0.5)]
