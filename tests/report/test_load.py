"""Reading run directories, whole, partial and broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.report.load import load_run
from spark_megatron.types import Interval

Edit = Callable[[Path, Callable[[Any], Any]], None]


def test_a_whole_run(run_directory: Path) -> None:
    run = load_run(run_directory)
    assert run.missing == []
    assert run.name == "spark_tiny"
    assert run.series["reward/solve"].steps == list(range(1, 13))
    assert run.series["reward/solve"].values == [step / 20 for step in range(1, 13)]
    assert run.times[0] == 1004.0
    assert run.config["seed"] == 17
    assert run.evals["after"]["judge_pair"] == Interval(acc=0.75, ci=(0.65, 0.85), n=80)
    assert list(run.evals["after"]) == ["solve", "judge_one", "judge_pair", "reflect"]  # the counts are no accuracy


@pytest.mark.parametrize(("step", "known"), [(12, True), (11, False)])
def test_an_evaluation_from_before_the_run_was_made_longer_is_left_out(
    run_directory: Path, edit_json: Edit, step: int, known: bool
) -> None:
    edit_json(run_directory / "eval.json", lambda evals: {**evals, "after": {**evals["after"], "step": step}})
    run = load_run(run_directory)
    assert ("after" in run.evals) == known
    assert run.missing == ([] if known else ["eval.json has no 'after' part (yet)."])


def test_a_directory_named_after_its_time_is_shown_with_the_name_of_the_run(run_directory: Path) -> None:
    renamed = run_directory.rename(run_directory.parent / "2026-01-31_12-00-00")
    assert load_run(renamed).name == "spark_tiny 2026-01-31_12-00-00"


def test_null_values_are_left_out(run_directory: Path) -> None:
    assert "policy/loss" not in load_run(run_directory).series


def test_named_takes_the_prefix_off(run_directory: Path) -> None:
    assert set(load_run(run_directory).named("weights/")) == {"policy", "kl"}


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run directory .*nowhere"):
        load_run(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "eval.json", "config.yaml"])
def test_each_missing_file_is_named(run_directory: Path, name: str) -> None:
    (run_directory / name).unlink()
    (missing,) = load_run(run_directory).missing
    assert missing.startswith(f"{name} does not exist: ")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1}\nbroken\n{"step": 2}\n'),
        ("metrics.jsonl", '{"no step": 1}\n{"no step": 1}\n'),
        ("rollouts.jsonl", '{"kind": "solve"}\n'),
        ("eval.json", '{"before": '),
        ("eval.json", "[1]"),
        ("eval.json", '{"before": {"solve": {"acc": 0.5, "ci": [0.1], "n": 3}}}'),
        ("config.yaml", "a: [1"),
        ("config.yaml", "only words"),
    ],
)
def test_each_unreadable_file_is_named(run_directory: Path, name: str, content: str) -> None:
    (run_directory / name).write_text(content)
    (missing,) = load_run(run_directory).missing
    assert missing.startswith(f"{name} cannot be read: ")


def test_a_run_that_is_still_on(run_directory: Path, edit_json: Edit) -> None:
    edit_json(run_directory / "eval.json", lambda stored: {"before": stored["before"]})
    with (run_directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "rew')
    run = load_run(run_directory)
    assert run.missing == ["eval.json has no 'after' part (yet)."]
    assert run.series["reward/solve"].steps[-1] == 12


def test_a_run_without_a_finished_step(run_directory: Path) -> None:
    (run_directory / "metrics.jsonl").write_text("")
    assert load_run(run_directory).missing == ["metrics.jsonl has no finished step yet."]


def test_what_was_not_tested_is_left_out(run_directory: Path, edit_json: Edit) -> None:
    nothing = {"acc": None, "ci": [0, 1], "n": 0}
    edit_json(run_directory / "eval.json", lambda s: {**s, "after": {**s["after"], "reflect": nothing}})
    run = load_run(run_directory)
    assert "reflect" in run.evals["before"]
    assert "reflect" not in run.evals["after"]
