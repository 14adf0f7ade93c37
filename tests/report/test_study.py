"""The figures of a study against values worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from spark_megatron.report import study
from spark_megatron.report.study import Outcome
from spark_megatron.report.study_picture import save_study


def test_the_interval_is_student_s() -> None:
    """Of 1, 2, 3: standard error 1 / sqrt(3), and the 97.5 % quantile of t with 2 degrees of freedom is 4.302653."""
    found = study.estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert 2.0 - found.low == pytest.approx(found.high - 2.0)


def test_a_single_seed_has_no_interval() -> None:
    found = study.estimate([0.5])
    assert found.mean == 0.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_methods_are_compared_seed_by_seed() -> None:
    """Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641 with 2 degrees of freedom, for which p = 0.07418."""
    found = study.compare({0: 11.0, 1: 3.0, 2: 8.0, 3: 99.0}, {2: 5.0, 1: 1.0, 0: 10.0, 7: 0.0})
    assert found.difference == 2.0
    assert found.p == pytest.approx(0.074180, abs=1e-5)


@pytest.mark.parametrize("others", [{0: 1.0}, {0: 1.0, 1: 2.0}, {5: 1.0}])
def test_nothing_is_claimed_of_too_little(others: dict[int, float]) -> None:
    """One common seed, equal differences, or none at all."""
    assert math.isnan(study.compare({0: 2.0, 1: 3.0}, others).p)


def outcome(method: str, seed: int, solve: float) -> Outcome:
    figures = dict.fromkeys(study.FIGURES, 0.5) | {"solve": solve, "tokens": 100.0, "steps": 4.0}
    return Outcome(method, seed, figures, dict.fromkeys(study.SKILLS, 0.25))


def test_a_summary_has_the_start_model_all_methods_and_differences() -> None:
    outcomes = [outcome("grpo", 0, 0.5), outcome("grpo", 1, 0.7), outcome("spark", 0, 0.6), outcome("spark", 1, 0.9)]
    found = study.summary(outcomes, "grpo")
    assert list(found) == ["untrained", "grpo", "spark"]
    assert found["untrained"]["solve"]["mean"] == 0.25
    assert found["spark"]["solve"]["mean"] == pytest.approx(0.75)
    assert found["spark"]["solve"]["difference"] == pytest.approx(0.15)
    assert found["spark"]["solve"]["p"] == pytest.approx(0.2048, abs=1e-4)  # t = 3 with one degree of freedom
    assert "p" not in found["grpo"]["solve"]
    assert found["spark"]["tokens"]["mean"] == 100.0


def test_a_run_is_read_from_its_directory(tmp_path: Path) -> None:
    assert not study.is_finished(tmp_path)
    skills = {skill: {"acc": 0.1 * i} for i, skill in enumerate(study.SKILLS)}
    path = tmp_path / "eval.json"
    path.write_text(json.dumps({"before": skills}))
    assert not study.is_finished(tmp_path)
    after = skills | {"solve": {"acc": 0.9}, "counts": {"flips/right_to_wrong": 2, "flips/wrong_to_right": 5}}
    path.write_text(json.dumps({"before": skills, "after": after}))
    rows = [{"step": step, "tokens/generated": 10.0 * step, "time/step": 0.5} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert study.is_finished(tmp_path)
    found = study.read_outcome("grpo", 3, tmp_path)
    assert (found.method, found.seed, found.before["solve"]) == ("grpo", 3, 0.0)
    assert found.figures == {
        "solve": 0.9, "judge_one": 0.1, "judge_pair": 0.2, "reflect": pytest.approx(0.3), "right_to_wrong": 2,
        "wrong_to_right": 5, "tokens": 30.0, "seconds": 1.0, "steps": 2.0,
    }  # fmt: skip


def test_the_picture_shows_one_seed_and_several(tmp_path: Path) -> None:
    for seeds in (1, 2):
        results = {"steps": study.summary([outcome("grpo", seed, 0.5 + 0.1 * seed) for seed in range(seeds)], "grpo")}
        save_study(results, tmp_path / f"{seeds}.png")
        assert (tmp_path / f"{seeds}.png").stat().st_size > 10_000
