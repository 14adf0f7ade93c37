"""The command line up to the point where ranks would start."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_megatron.cli import train
from spark_megatron.cli.compose import groups
from spark_megatron.cli.run_dir import reserve
from spark_megatron.schema import ConfigError
from tests.settings import save_shape

ROOT = Path(__file__).parents[2]


Ended = tuple[int, str, str]
"""Exit code, output and errors."""


def spark_train(*arguments: str) -> Ended:
    command = [sys.executable, "-m", "spark_megatron.cli.train", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """``spark_train`` in this process, which has imported already what it needs."""

    def spark_train(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["spark-train", *arguments])
        with pytest.raises(SystemExit) as ended:
            train.main()
        told = ended.value.code
        output, errors = capsys.readouterr()
        return (told, output, errors) if isinstance(told, int) else (1, output, f"{errors}{told}\n")

    return spark_train


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainer.totl_steps=5", "trainer.totl_steps=5: there is no setting trainer.totl_steps; did you mean "
         "trainer.total_steps?"),
        ("rollout.samples_per_task=1", "rollout.samples_per_task=1: a group needs at least 2 rollouts, or every "
         "advantage is 0"),
        ("recycle.pairwise_prob=2", "recycle.pairwise_prob=2: must lie in [0, 1]"),
        ("rollout.backend.kv_cache_mb=0", "rollout.backend.kv_cache_mb=0 cannot hold the keys and values of one "
         "sequence of rollout.backend.max_model_len=128 tokens: set it to 1 or more"),
        ("--multirun", "--multirun is no option; there are --help and --check, all else is written name=value"),
    ],
)  # fmt: skip
def test_a_wrong_setting_ends_in_one_line_before_anything_is_written(
    here: Callable[..., Ended], tmp_path: Path, override: str, line: str
) -> None:
    model, run_dir = save_shape(tmp_path / "shape"), tmp_path / "run"
    assert here(f"model.path={model}", f"run_dir={run_dir}", override) == (1, "", f"spark-train: {line}\n")
    assert not run_dir.exists()


def test_results_of_another_run_are_left_alone(here: Callable[..., Ended], tmp_path: Path) -> None:
    model, run_dir = save_shape(tmp_path / "shape"), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("{}\n")
    code, _, errors = here(f"model.path={model}", f"run_dir={run_dir}", "checkpoint.resume=never")
    assert code == 1
    assert errors.startswith(f"spark-train: run_dir={run_dir} already holds a run and checkpoint.resume=never: ")
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
    assert (run_dir / "metrics.jsonl").read_text() == "{}\n"


def test_a_run_dir_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run cannot be made \(Not a directory\): choose another directory"):
        reserve(tmp_path / "file" / "run")
    reserve(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_help_lists_groups_and_experiments() -> None:
    code, output, errors = spark_train("--help")
    assert (code, errors) == (0, "")
    assert output.startswith("spark-train: ")
    lines = [line.split(maxsplit=1) for line in output.splitlines() if line.startswith("  ")]
    listed = {words[0]: words[1] for words in lines if len(words) == 2}
    choices = groups()
    for experiment in choices.pop("experiment"):
        assert len(listed[experiment]) > 20
    for group, names in choices.items():
        assert listed[group] == ", ".join(names)


def test_check_starts_and_writes_nothing(tmp_path: Path) -> None:
    model, run_dir = save_shape(tmp_path / "shape"), tmp_path / "run"
    settings = (f"model.path={model}", f"run_dir={run_dir}", "experiment=spark_tiny", "trainer.total_steps=5")
    told = "spark_tiny: the settings can work (2 ranks, 5 steps)\n"
    assert spark_train("--check", *settings, "parallel=pp2") == (0, told, "")
    assert not run_dir.exists()
    told = "spark-train: seed=1.5 must be a whole number\n"
    assert spark_train("--check", *settings, "seed=1.5") == (1, "", told)
