"""Runs that were stopped go on as if they had not been."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from spark_megatron.cli import resume
from spark_megatron.cli.launch import launch
from spark_megatron.report.load import load_run
from spark_megatron.schema import ConfigError
from spark_megatron.tracking.jsonl import read_jsonl, read_steps
from tests import distributed
from tests.cli.runs import WHOLE, children, rows, start
from tests.settings import typed

COMMON = (
    "experiment=spark_tiny", "checkpoint.every=2", "checkpoint.keep=9", "tracking.record_groups=64",
    "trainer.max_tokens_per_microbatch=2048", "objective.updates_per_period=1", "optim.warmup_updates=2",
)  # fmt: skip
TINY = (*COMMON, "rollout=scripted", "trainer.tasks_per_step=8", "rollout.samples_per_task=4", "eval.items=8")
GUESSES = "rollout.backend.responses=[" + ",".join(f"'\\boxed{{{n}}}'" for n in range(11)) + "]"
"""Some of them are right, so that there are pairs to learn from."""
OBJECTIVES = {
    "alternating": ("kl_schedule=adaptive", "trainer.eval_every=3"),
    "joint": ("objective=joint", "weight_schedule=linear", "weight_schedule.end.pairwise=0.9"),
    "sft": ("trainer=sft", "model.path=examples/models/spark_tiny"),
    "cooper": (
        "trainer=cooper",
        "trainer.eval_every=3",
        "reward_model.optim.lr=1e-3",
        "rollout.samples_per_task=16",
        GUESSES,
    ),
    "verify_rm": ("trainer=verify_rm", "reward_model.optim.lr=1e-3"),
}


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step but for times and memory, which are the machine's."""
    own = re.compile(r"time|memory|tokens/per_s|handoff/.*_s$")
    return [{k: v for k, v in row.items() if not own.match(k)} for row in read_steps(run_dir / "metrics.jsonl")]


def groups(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "rollouts.jsonl"
    return list(read_jsonl(path)) if path.exists() else []


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The trained model's, and those of the reward model where the run has one."""
    files = (run_dir / folder / "model" / "model.safetensors" for folder in ("", "reward_model"))
    return {
        f"{file}"[len(f"{run_dir}") :] + name: x
        for file in files
        if file.exists()
        for name, x in load_file(file).items()
    }


def state(checkpoint: Path) -> dict[str, Any]:
    from spark_megatron.engine.checkpoint import read_state

    return read_state(checkpoint)


def position(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint but for the settings and versions, which say where the run came from."""
    return {k: v for k, v in state(checkpoint).items() if k not in ("origin", "config", "provenance")}


def assert_same_results(resumed: Path, whole: Path, first_step: int = 1) -> None:
    assert numbers(resumed) == [row for row in numbers(whole) if row["step"] >= first_step]
    assert groups(resumed) == [row for row in groups(whole) if row["step"] >= first_step]
    assert (resumed / "eval.json").read_text() == (whole / "eval.json").read_text()
    assert position(step_folder(resumed, 4)) == position(step_folder(whole, 4))
    expected = weights(whole)
    for name, weight in weights(resumed).items():
        assert torch.equal(weight, expected.pop(name)), name
    assert not expected


# Runs of one job, with scripted responses.


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of the runs, and what each said when it began; "x2" goes on from step 2 of "x" in another folder."""
    root = tmp_path_factory.mktemp("scripted")
    starts: dict[str, tuple[str, ...]] = {}
    for name, changed in OBJECTIVES.items():
        settings = (*TINY, *changed, "trainer.total_steps=4")
        starts[name] = (*settings, f"run_dir={root / name}")
        origin = f"checkpoint.resume={step_folder(root / name, 2)}"
        starts[f"{name}2"] = (*settings, f"run_dir={root / name}2", origin)
    longer = (*TINY, f"run_dir={root / 'longer'}", "seed=5")
    starts["short"] = (*longer, "trainer.total_steps=2")
    starts["longer"] = (*longer, "trainer.total_steps=4", "parallel=pp2", "kl_schedule=adaptive", "seed=6")
    starts["again"] = (*longer, "trainer.total_steps=4")
    starts["refused"] = (*longer, "trainer.total_steps=5", "checkpoint.resume=never")
    said, other = distributed.run(2, "tests.cli.ranks_resume:runs", root / "job", starts=list(starts.values()))
    assert said == other
    return root, dict(zip(starts, said, strict=True))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(scripted: tuple[Path, dict[str, str]], name: str) -> None:
    root, said = scripted
    assert_same_results(root / f"{name}2", root / name, first_step=3)
    start_of = step_folder(root / name, 2)
    assert said[f"{name}2"].startswith(f"going on from step 2 of 4 ({start_of})")
    assert state(step_folder(root / f"{name}2", 4))["origin"] == str(start_of)
    assert state(step_folder(root / name, 4))["origin"] is None


def test_the_runs_above_have_a_state_to_lose(scripted: tuple[Path, dict[str, str]]) -> None:
    root, _ = scripted
    assert all(row["reward_model/pair_loss"] > 0 for row in numbers(root / "cooper"))
    assert state(step_folder(root / "cooper", 2))["monitor"]["steps"] == 2
    assert "hacking/alarm" in numbers(root / "cooper2")[0]
    assert numbers(root / "verify_rm2")[0]["reward_model/label_loss"] > 0
    saved = state(step_folder(root / "alternating", 2))
    assert saved["pool"]["tasks"]
    assert saved["kl_schedule"]["coef"] != saved["config"]["kl_schedule"]["initial"]
    assert saved["stream"]["position"] == 16
    assert len({row["policy/lr"] for row in numbers(root / "alternating")}) == 4
    rows = numbers(root / "alternating2")
    assert "eval/best_solve" in rows[0]
    assert state(step_folder(root / "alternating2", 4))["best"] == rows[0]["eval/best_solve"]
    assert len({row["weights/pairwise"] for row in numbers(root / "joint2")}) == 2


def test_a_finished_run_can_be_made_longer(scripted: tuple[Path, dict[str, str]]) -> None:
    """In another layout, with other tasks and another KL schedule, which it says in one message."""
    root, said = scripted
    run_dir = root / "longer"
    assert said["short"] == f"no checkpoint in {run_dir / 'checkpoints'}: starting at step 0"
    first, *changed = said["longer"].splitlines()
    assert first == f"going on from step 2 of 4 ({step_folder(run_dir, 2)}); changed since then:"
    assert {"  seed: 5 -> 6", "  parallel.tensor: 2 -> 1", "  parallel.pipeline: 1 -> 2",
            "  trainer.total_steps: 2 -> 4"} <= set(changed)  # fmt: skip
    assert [row["step"] for row in numbers(run_dir)] == [1, 2, 3, 4]
    assert state(step_folder(run_dir, 4))["stream"]["position"] == 16, "other tasks start at their beginning"
    evaluated = json.loads((run_dir / "eval.json").read_text())
    assert evaluated["after"]["step"] == 4
    assert evaluated["before"] == state(step_folder(run_dir, 2))["before"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["total_steps"] == 4
    assert said["again"].startswith(f"run_dir={run_dir} holds a finished run of 4 steps: raise trainer.total_steps")


def test_a_refusal_is_that_of_all_ranks(scripted: tuple[Path, dict[str, str]]) -> None:
    root, said = scripted
    assert said["refused"].startswith(f"run_dir={root / 'longer'} already holds a run and checkpoint.resume=never: ")


# How a start is planned.


@pytest.fixture
def short(scripted: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    """A copy of a finished run of four steps with checkpoints of steps 2 and 4."""
    root, _ = scripted
    return Path(shutil.copytree(root / "alternating", tmp_path / "run"))


def planned(run_dir: Path, *overrides: str) -> resume.Start:
    from spark_megatron.cli.compose import load

    settings = (*TINY, *OBJECTIVES["alternating"], "trainer.total_steps=4", f"run_dir={run_dir}")
    return resume.plan(load([*settings, *overrides])[1])


def refusal(run_dir: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(run_dir, *overrides)
    return str(caught.value)


def files(folder: Path) -> Mapping[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_left_alone(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(short)
    settings = [*TINY, *OBJECTIVES["alternating"], "trainer.total_steps=4", f"run_dir={short}"]
    assert launch(settings) == 0
    said = (
        f"run_dir={short} holds a finished run of 4 steps: raise trainer.total_steps to go on with it, or choose "
        "another run_dir"
    )
    assert capsys.readouterr().err.startswith(said)
    assert files(short) == before
    first, *changed = planned(short, "trainer.total_steps=3", "seed=1").message.splitlines()
    assert first == f"{said}; changed since then:"
    assert {"  seed: 0 -> 1", "  trainer.total_steps: 4 -> 3"} <= set(changed)


def test_a_run_killed_in_its_last_evaluation_is_not_finished(short: Path) -> None:
    evaluated = json.loads((short / "eval.json").read_text())
    del evaluated["after"]
    (short / "eval.json").write_text(json.dumps(evaluated))
    found = planned(short)
    assert (found.checkpoint, found.finished) == (step_folder(short, 4), False)


def test_never_refuses_a_directory_with_a_run(short: Path, tmp_path: Path) -> None:
    told = (
        f"run_dir={short} already holds a run and checkpoint.resume=never: choose another run_dir, or go on with "
        "checkpoint.resume=auto"
    )
    assert refusal(short, "checkpoint.resume=never") == told
    shutil.rmtree(short / "checkpoints")
    assert refusal(short, "checkpoint.resume=never") == told
    assert planned(tmp_path / "new", "checkpoint.resume=never") == resume.Start(None, 0, False, "starting at step 0")


def test_without_a_checkpoint_a_run_starts_anew_and_says_so(short: Path, tmp_path: Path) -> None:
    """Also where it was killed before its first checkpoint, but never over the results of a finished one."""
    (short / "eval.json").unlink()
    shutil.rmtree(short / "checkpoints")
    for run_dir, earlier in ((tmp_path / "new", ""), (short, "; what was logged before is removed")):
        told = f"no checkpoint in {run_dir / 'checkpoints'}: starting at step 0{earlier}"
        assert planned(run_dir) == resume.Start(None, 0, False, told)


def test_a_finished_run_without_a_checkpoint_is_not_overwritten(short: Path) -> None:
    shutil.rmtree(short / "checkpoints")
    told = f"run_dir={short} holds a finished run but no checkpoint to go on from: choose another run_dir"
    assert refusal(short) == told
    (short / "eval.json").write_text("{")
    assert refusal(short).startswith(f"run_dir={short}: eval.json cannot be read (")


def test_a_checkpoint_by_its_path(short: Path, tmp_path: Path) -> None:
    new, two, four = tmp_path / "new", step_folder(short, 2), step_folder(short, 4)
    assert planned(new, f"checkpoint.resume={two}").checkpoint == two
    assert refusal(new, f"checkpoint.resume={four}") == (
        f"trainer.total_steps=4, but checkpoint.resume={four} is at step 4: nothing is left to train, raise "
        "trainer.total_steps"
    )
    # In a directory with checkpoints of its own, only the command that it was begun with goes on.
    assert refusal(short, f"checkpoint.resume={two}") == (
        f"checkpoint.resume={two}, but run_dir={short} has checkpoints of its own: choose another run_dir, or go on "
        f"from {four.name} with checkpoint.resume=auto"
    )


def test_the_command_that_began_from_a_path_goes_on_with_the_newest(scripted: tuple[Path, dict[str, str]]) -> None:
    root, _ = scripted
    begun = f"checkpoint.resume={step_folder(root / 'alternating', 2)}"
    found = planned(root / "alternating2", begun, "trainer.total_steps=5")
    assert found.checkpoint == step_folder(root / "alternating2", 4)


def test_a_path_without_a_checkpoint_is_refused(short: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    told = f"checkpoint.resume={tmp_path / 'none'} does not exist: give auto, never or the directory of a checkpoint"
    assert refusal(new, f"checkpoint.resume={tmp_path / 'none'}") == told
    newest = step_folder(short, 4)
    for folder in (short, short / "checkpoints"):
        told = f"checkpoint.resume={folder} is no checkpoint; did you mean {newest}?"
        assert refusal(new, f"checkpoint.resume={folder}") == told
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refusal(new, f"checkpoint.resume={tmp_path / 'empty'}")


def test_a_checkpoint_that_does_not_fit_is_refused(short: Path) -> None:
    assert refusal(short, "model.dtype=bf16").startswith(
        f"model.dtype=bf16, but {step_folder(short, 4)} was saved with fp32: "
    )


# Real runs through the command line.


@pytest.fixture(scope="module")
def real(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """An uninterrupted run; one with the same settings, killed after its third step and started again; what the latter
    said when it went on."""
    killed = tmp_path_factory.mktemp("runs") / "killed"
    process = start(killed, *WHOLE)
    ranks = []
    deadline = time.monotonic() + 200
    while not (killed / "metrics.jsonl").exists() or len(rows(killed)) < 3:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline
        ranks = children(process.pid)
        time.sleep(0.05)
    for pid in (process.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    again = start(killed, *WHOLE)
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output[-4000:]
    return whole, killed, output


def test_a_killed_run_goes_on_bit_for_bit(real: tuple[Path, Path, str]) -> None:
    whole, killed, _ = real
    assert_same_results(killed, whole)


def test_the_killed_run_had_steps_left(real: tuple[Path, Path, str]) -> None:
    """Counts and the time left are those of the whole run; the start model is not evaluated again."""
    _, killed, output = real
    assert [row["step"] for row in rows(killed)] == [1, 2, 3, 4], "the third step was logged twice, the first is gone"
    assert "going on from step 2 of 4" in output
    assert "before training" not in output
    shown = [line.split() for line in output.splitlines() if line.strip()[:2] in ("3/", "4/")]
    assert [(words[0], words[-1]) for words in shown] == [("3/4", "-"), ("4/4", "0:00:00")]


def test_the_report_of_the_killed_run_is_that_of_one_run(real: tuple[Path, Path, str]) -> None:
    whole, killed, _ = real
    ours, theirs = load_run(killed), load_run(whole)
    assert ours.missing == theirs.missing == []
    assert ours.examples == theirs.examples
    assert ours.series["policy/kl"] == theirs.series["policy/kl"]
    assert "4 of 4" in (killed / "report.html").read_text()


def test_the_killed_run_keeps_its_wandb_id(real: tuple[Path, Path, str]) -> None:
    whole, killed, _ = real
    kept = (killed / "wandb_id").read_text().strip()
    parts = [path.name for path in (killed / "wandb").glob("offline-run-*")]
    assert len(parts) == 2
    assert all(part.endswith(f"-{kept}") for part in parts)
    assert (whole / "wandb_id").read_text().strip() != kept


def test_settings_of_the_group(tmp_path: Path) -> None:
    found = typed(tmp_path).checkpoint
    assert (found.every, found.keep, found.asynchronous, found.resume) == (20, 2, True, "auto")
