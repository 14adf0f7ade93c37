"""The words and numbers of a report, by hand."""

import json
from pathlib import Path

import pytest
import yaml

from spark_megatron.report.facts import PhaseTime, duration, phase_times, reward_change, run_facts, status_counts
from spark_megatron.report.load import Run, Series, load_run
from spark_megatron.report.page import render_page


def test_facts_of_a_run(run_directory: Path) -> None:
    facts = run_facts(load_run(run_directory))
    assert facts.pop("Began").startswith("1970-01-0")
    assert facts == {
        "Configuration": "spark_tiny",
        "Trainer": "a.b.train",
        "Model": "models/tiny",
        "Precision": "fp32",
        "Seed": "17",
        "Layout": "ranks 2, tensor 2",
        "Steps": "12 of 60",
        "Duration": "48 s",
        "Time in steps": "48 s (median 4.00 s a step)",
        "Tokens generated": "12,000",
        "Tokens per second": "250 (median step)",
        "Peak memory": "1.62 GB resident, first rank",
    }


def test_a_run_with_label_noise_says_so(run_directory: Path) -> None:
    config = yaml.safe_load((run_directory / "config.yaml").read_text())
    config["label_noise"] = {"right_to_wrong": 0.1, "wrong_to_right": 0.0}
    (run_directory / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    rows = [
        row | {"label_noise/right_to_wrong": 0.05 + 0.1 * (i % 2), "label_noise/wrong_to_right": 0.0}
        for i, row in enumerate(rows)
    ]
    (run_directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(run_directory)
    expected = "labels flipped on purpose in training: 10 % of right answers (really 10.0 %)"
    assert run_facts(run)["Label noise"] == expected
    assert f"<b>Label noise:</b> {expected}." in render_page(run, "")


def test_nothing_known_is_nothing_said() -> None:
    run = Run(name="x")
    assert (run_facts(run), phase_times(run), status_counts(run), reward_change(run)) == ({}, [], {}, {})


def test_phases_in_their_order_with_shares(run_directory: Path) -> None:
    assert phase_times(load_run(run_directory)) == [
        PhaseTime("rollout", 2.0, 0.5, 24.0),
        PhaseTime("update", 1.0, 0.25, 12.0),
        PhaseTime("other", 1.0, 0.25, 12.0),
    ]


def test_a_phase_of_some_steps_is_averaged_over_all() -> None:
    series = {"time/step": Series([1, 2], [3.0, 1.0]), "time/eval": Series([1], [2.0]), "time/new": Series([2], [2.0])}
    assert phase_times(Run(name="x", series=series)) == [
        PhaseTime("eval", 1.0, 0.5, 2.0),
        PhaseTime("new", 1.0, 0.5, 2.0),
    ]


def test_statuses_are_added_up_over_the_run(run_directory: Path) -> None:
    assert status_counts(load_run(run_directory))["judge_pair"] == {"ok": 180, "unparsed": 12}


def test_reward_change_is_first_against_last_tenth() -> None:
    values = [0.0, 0.2, *[0.5] * 16, 0.8, 1.0]
    run = Run(name="x", series={"reward/solve": Series(list(range(20)), values)})
    assert reward_change(run) == {"solve": (pytest.approx(0.1), pytest.approx(0.9))}


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.4, 725, 11220)] == ["0 s", "59 s", "12 min 05 s", "3 h 07 min"]
