"""The tracker, with real files behind it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_megatron.tracking.clock import Clock
from spark_megatron.tracking.jsonl import read_jsonl, read_steps
from spark_megatron.tracking.recorder import Recorder
from spark_megatron.tracking.sinks import JsonlSink
from spark_megatron.tracking.tracker import Tracker
from spark_megatron.types import Group, Verdict


class Hand:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def open_tracker(directory: Path, hand: Hand) -> Tracker:
    return Tracker(
        sinks=[JsonlSink(path=directory / "metrics.jsonl")],
        recorder=Recorder(path=directory / "rollouts.jsonl", groups=1),
        total_steps=4,
        clock=Clock(now=hand),
    )


def test_a_run_of_three_steps(tmp_path: Path, make_group: Callable[..., Group]) -> None:
    hand = Hand()
    track = open_tracker(tmp_path, hand)
    for step in (1, 2, 3):
        with track.step(step) as span:
            with span("rollout"):
                hand.seconds += 10 * step
            track.log({"policy/kl": 9.0, "tokens/generated": 600.0})
            track.log({"policy/kl": step / 10})
            track.record([make_group([Verdict("ok", 1.0, "2")])])
    track.close()
    rows = read_steps(tmp_path / "metrics.jsonl")
    assert [row["policy/kl"] for row in rows] == [0.1, 0.2, 0.3]
    assert [row["time/rollout"] for row in rows] == [10, 20, 30]
    assert [row["tokens/per_s"] for row in rows] == [60, 30, 20]
    assert [row.get("time/eta") for row in rows] == [None, 40, 25]
    assert all(row["memory/peak_rss_gb"] > 0 for row in rows)
    assert [row["step"] for row in read_jsonl(tmp_path / "rollouts.jsonl")] == [1, 2, 3]


def test_own_tokens_per_second_are_kept(tmp_path: Path) -> None:
    track = open_tracker(tmp_path, Hand())
    with track.step(1):
        track.log({"tokens/generated": 5.0, "tokens/per_s": 123.0})
    track.close()
    assert read_steps(tmp_path / "metrics.jsonl")[0]["tokens/per_s"] == 123.0


def test_a_step_that_raises_is_not_logged_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    track = open_tracker(tmp_path, Hand())
    with pytest.raises(KeyError), track.step(1):
        track.log({"policy/loss": 1.0})
        raise KeyError
    with track.step(2):
        track.log({"policy/kl": 0.5})
    track.close()
    (row,) = read_steps(tmp_path / "metrics.jsonl")
    assert row["step"] == 2
    assert "policy/loss" not in row


def test_other_ranks_run_the_same_code_and_write_nothing(tmp_path: Path, make_group: Callable[..., Group]) -> None:
    track = Tracker(sinks=(), recorder=None, total_steps=1)
    with track.step(1) as span, span("rollout"):
        track.log({"policy/kl": 0.1})
        track.record([make_group([Verdict("ok", 1.0, "2")])])
    track.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [lambda t: t.log({"x": 1.0}), lambda t: t.record([])])
def test_refuses_to_log_or_record_outside_a_step(call: Callable[[Tracker], None]) -> None:
    with pytest.raises(RuntimeError, match="outside a step"):
        call(Tracker(sinks=(), recorder=None, total_steps=1))
