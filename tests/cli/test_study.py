"""spark-study: what it trains, that it goes on where it was stopped, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spark_megatron.cli import study
from spark_megatron.cli.study import Run
from spark_megatron.report.study import SKILLS
from spark_megatron.schema import ConfigError


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that were trained; each leaves the figures of a run of as many steps, SPARK with twice the tokens."""
    done: list[Run] = []

    def train(run: Run) -> None:
        done.append(run)
        run.directory.mkdir(parents=True)
        set_to = [o.partition("=")[2] for o in run.overrides if o.startswith("trainer.total_steps=")]
        steps = int(set_to[-1]) if set_to else 10
        tokens = 20.0 if run.method == "spark" else 10.0
        rows = [{"step": i + 1, "tokens/generated": tokens, "time/step": 1.0} for i in range(steps)]
        (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        skills = {skill: {"acc": 0.5 + 0.1 * run.seed} for skill in SKILLS}
        counts = {"flips/right_to_wrong": 1, "flips/wrong_to_right": 2}
        (run.directory / "eval.json").write_text(json.dumps({"before": skills, "after": skills | {"counts": counts}}))

    monkeypatch.setattr(study, "_train_one", train)
    return done


def settings(tmp_path: Path, *more: str) -> study.Settings:
    """Of a study of two methods."""
    without = [f"methods.{name}=null" for name in ("reward_only", "offline_judges", "spark_joint")]
    return study.read([f"out={tmp_path}", "seeds=2", *without, *more])


def test_both_halves_are_trained_once_and_shown(
    tmp_path: Path, trained: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """At equal tokens GRPO gets twice the steps, and SPARK's own runs serve again."""
    study.conduct(settings(tmp_path))
    names = [(*run.directory.relative_to(tmp_path).parts,) for run in trained]
    assert names == [
        *[("steps", method, f"seed_{seed}") for seed in (0, 1) for method in ("grpo", "spark")],
        *[("tokens", "grpo", f"seed_{seed}") for seed in (0, 1)],
    ]
    assert [run.overrides.count("recycle=none") for run in trained] == [1, 0, 1, 0, 1, 1]
    assert "trainer.total_steps=20" in trained[-1].overrides
    results = json.loads((tmp_path / "study.json").read_text())
    assert results["tokens"]["grpo"]["tokens"]["mean"] == results["tokens"]["spark"]["tokens"]["mean"] == 200.0
    assert results["steps"]["grpo"]["tokens"]["mean"] == 100.0
    assert (tmp_path / "study.png").is_file()
    shown = capsys.readouterr().out
    assert "equal steps 3/4  grpo seed 1: solve 0.600" in shown
    assert "eta" in shown


def test_a_stopped_study_goes_on(tmp_path: Path, trained: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    study.conduct(settings(tmp_path, "tokens_of=null"))
    (tmp_path / "steps/spark/seed_1/eval.json").unlink()
    (tmp_path / "steps/spark/seed_1/metrics.jsonl").unlink()
    (tmp_path / "steps/spark/seed_1").rmdir()
    trained.clear()
    study.conduct(settings(tmp_path, "tokens_of=null"))
    assert [(run.method, run.seed) for run in trained] == [("spark", 1)]
    assert "there already" in capsys.readouterr().out


def test_quick_is_shorter(tmp_path: Path) -> None:
    quick, whole = settings(tmp_path, "quick=true"), settings(tmp_path)
    assert study.runs(quick, "steps", 1)[0].overrides != study.runs(whole, "steps", 1)[0].overrides
    assert "eval.items=200" in study.runs(quick, "steps", 1)[0].overrides


def test_a_failed_run_is_named_with_its_log(tmp_path: Path) -> None:
    run = Run("grpo", 0, tmp_path / "seed_0", ("experiment=nothing",))
    with pytest.raises(ConfigError, match=r"grpo with seed 0 ended with code 1: see .*seed_0\.log"):
        study._train_one(run)
    assert "experiment=nothing" in (tmp_path / "seed_0.log").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seeds=0", "seeds=0 must be at least 1"),
        ("baseline=ppo", "baseline=ppo is none of the methods grpo, spark"),
        ("tokens_of=ppo", "tokens_of=ppo is none of the methods grpo, spark"),
        ("methods.more=5", "methods.more=5: give a list of settings of spark-train, [] for none"),
        ("sedes=2", "there is no setting sedes; did you mean seeds?"),
        ("--seeds", "--seeds cannot be read: there is the option --help, all else is written name=value"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, override)
    assert message in str(refused.value)


def test_settings_of_a_method_are_checked_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"methods\.grpo: .*recycle=nothing"):
        study.check(settings(tmp_path, "methods.grpo=[recycle=nothing]"))
