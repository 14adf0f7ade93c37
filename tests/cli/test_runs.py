"""Whole runs through the command line, on the real engines and the shipped start model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import distributed
from tests.cli.runs import REPOSITORY, SCRIPTED, SMALL, children, rows, start
from tools import make_tiny_model

LAYOUTS = ("single", "tp2", "pp2", "dp2")
IN_RANKS = "tests.cli.ranks_resume:runs"
"""Runs in ranks that are there already: what the command line does once it has started them."""


def test_first_update_starts_from_the_reference_and_on_policy(whole: Path) -> None:
    first = rows(whole)[0]
    assert first["policy/first_kl"] == 0.0
    assert first["policy/first_ratio"] == 1.0


def test_trainer_and_sampler_agree_at_every_step(whole: Path) -> None:
    # fp32 on both sides: only the order of summation differs.
    for row in rows(whole):
        assert 0 < row["handoff/probe_max_abs"] < 1e-4
        assert 0 < row["mismatch/max_abs"] < 1e-4


def test_reward_periods_follow_once_the_pool_is_full(whole: Path) -> None:
    judged = [row for row in rows(whole) if "reward_period/loss" in row]
    assert judged
    kinds = ("judge_one", "judge_pair", "reflect")
    assert all(any(f"reward/{kind}" in row for kind in kinds) for row in judged)


def test_run_directory_is_complete(whole: Path) -> None:
    evaluation = json.loads((whole / "eval.json").read_text())
    for when in ("before", "after"):
        for skill in ("solve", "judge_one", "judge_pair", "reflect"):
            figure = evaluation[when][skill]
            assert figure["n"] == 20
            assert figure["ci"][0] <= figure["acc"] <= figure["ci"][1]
    recorded = [json.loads(line) for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in recorded} >= {"solve", "reflect"}
    assert (whole / "report.png").stat().st_size > 10_000
    assert "<html" in (whole / "report.html").read_text()
    assert list((whole / "wandb").glob("offline-run-*"))
    assert {"git", "packages"} <= set(json.loads((whole / "provenance.json").read_text()))


def test_the_trained_model_loads_and_differs_from_the_start(whole: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(whole / "model")
    begin = AutoModelForCausalLM.from_pretrained(REPOSITORY / "examples/models/spark_tiny")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    assert tokenizer.decode(tokenizer.encode("11 8 \\boxed{8}")) == "11 8 \\boxed{8}"
    before, after = begin.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def joint(mode: str) -> tuple[str, ...]:
    modes = (f"objective.{kind}.mode={mode}" for kind in ("pointwise", "pairwise", "reflection"))
    return "experiment=spark_tiny", "objective=joint", "trainer.total_steps=1", *modes


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as the cold start begins with."""
    path = tmp_path_factory.mktemp("models") / "blank"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_tiny_model.py", str(path)])
        make_tiny_model.main()
    return path


@pytest.fixture(scope="module")
def scripted(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """The rows of metrics.jsonl of some runs with scripted responses."""
    root = tmp_path_factory.mktemp("scripted")
    one_update = ("experiment=spark_tiny", "trainer.total_steps=1", "objective.updates_per_period=1")
    starts: dict[str, tuple[str, ...]] = {layout: (*one_update, f"parallel={layout}") for layout in LAYOUTS}
    starts["supervised"] = joint("supervised")
    starts["grpo"] = (*one_update, "recycle=none")
    starts["offline"] = (*one_update, "recycle=offline", "trainer.total_steps=3")
    starts["reward_only"] = (*one_update, "trainer=reward_only", "trainer.total_steps=3")
    starts["sft"] = ("experiment=sft_tiny", f"model.path={blank}", "trainer.total_steps=6", "optim.warmup_updates=1")
    for ranks, names in ((1, ["single"]), (2, [name for name in starts if name != "single"])):
        settings = [(*starts[name], *SCRIPTED, f"run_dir={root / name}") for name in names]
        distributed.run(ranks, IN_RANKS, root / f"job{ranks}", starts=settings)
    return {name: rows(root / name) for name in starts}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """The rows of a run of alternating periods with the reference backend, and of one of joint updates with vLLM."""
    root = tmp_path_factory.mktemp("sampled")
    reference = ("experiment=spark_tiny", "rollout=transformers", "trainer.total_steps=2", *SMALL, "eval.items=2")
    kept = ("engine.release=[]", "rollout.backend.sleep_level=0")
    starts = {"transformers": reference, "vllm": (*joint("rl"), *SMALL, *kept)}
    settings = [(*overrides, f"run_dir={root / name}") for name, overrides in starts.items()]
    distributed.run(2, IN_RANKS, root / "job", starts=settings)
    return {name: rows(root / name) for name in starts}


def test_the_reference_backend_samples_for_training(sampled: dict[str, list[dict[str, float]]]) -> None:
    """Its log-probs are the trainer's, before and after an update."""
    assert len(sampled["transformers"]) == 2
    for row in sampled["transformers"]:
        assert 0 < row["handoff/probe_max_abs"] < 1e-4
        assert 0 < row["mismatch/max_abs"] < 1e-4
        assert 1.0 <= row["rollout/imbalance"] < 2.0
        assert row["rollout/too_long"] == 0
        assert row["policy/first_ratio"] == 1.0
        assert row["policy/grad_norm"] > 0


def test_what_keeps_its_memory_needs_no_second_hand_over(
    sampled: dict[str, list[dict[str, float]]], whole: Path
) -> None:
    """A sampler that sleeps deeply is filled for the evaluation before the first step, again for its rollouts, and
    after the policy period's update; one that keeps its weights, in a step of one update, once.
    """
    slept, (kept,) = rows(whole)[0], sampled["vllm"]
    assert slept["handoff/received_bytes"] == 3 * kept["handoff/received_bytes"] > 0
    assert slept["handoff/released_bytes"] > kept["handoff/released_bytes"] == 0


@pytest.mark.parametrize("mode", ["supervised", "rl"])
def test_joint_update_learns_all_components_at_once(
    mode: str, scripted: dict[str, list[dict[str, float]]], sampled: dict[str, list[dict[str, float]]]
) -> None:
    (row,) = sampled["vllm"] if mode == "rl" else scripted["supervised"]
    assert "reward_period/loss" not in row
    assert row["policy/first_kl"] == 0.0
    assert row["policy/first_ratio"] == 1.0
    assert row["weights/pointwise"] == 0.4
    assert ("policy/cross_entropy" in row) == (mode == "supervised")
    assert ("reward/reflect" in row) == (mode == "rl")


def test_every_layout_takes_the_same_first_step(scripted: dict[str, list[dict[str, float]]]) -> None:
    """Scripted rollouts are equal everywhere, so fp32 rounding (1e-5) is all that may differ."""
    first = {layout: scripted[layout] for layout in LAYOUTS}
    (expected,) = first["single"]
    for layout, (row,) in first.items():
        assert row["policy/grad_norm"] > 0
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (layout, name)


def test_baselines_learn_what_they_should_and_nothing_else(scripted: dict[str, list[dict[str, float]]]) -> None:
    """GRPO solves alone; offline judges come from no rollout; reward-only leaves the solutions unlearned."""
    (grpo,) = scripted["grpo"]
    assert grpo["policy/grad_norm"] > 0
    assert grpo["pool/size"] == 0
    assert not any("reward_period" in name or "judge" in name for name in grpo)
    offline = scripted["offline"]
    assert all("policy/loss" in row for row in offline)
    assert any("reward_period/loss" in row for row in offline)
    assert not any("reward/reflect" in row for row in offline)
    rewarded = scripted["reward_only"]
    assert all("reward/solve" in row and "policy/loss" not in row for row in rewarded)
    assert any(row.get("reward_period/grad_norm", 0.0) > 0 for row in rewarded)
    assert all(row["weights/kl"] > 0 for row in rewarded)


def test_the_cold_start_takes_its_first_steps(scripted: dict[str, list[dict[str, float]]]) -> None:
    losses = [row["sft/loss"] for row in scripted["sft"]]
    assert len(losses) == 6
    # A blank model is uniform over its 702 tokens.
    assert losses[0] == pytest.approx(6.55, abs=0.1)
    assert losses[-1] < losses[0] - 0.5


def test_torchrun_starts_it_too(tmp_path: Path) -> None:
    """The ranks agree on one run directory, though each composes its settings by itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "spark_megatron.cli.train"]
    settings = ("experiment=spark_tiny", "trainer.total_steps=1", f"run_dir={tmp_path}/${{now:%H-%M-%S-%f}}")
    subprocess.run([*command, *settings, *SCRIPTED], cwd=REPOSITORY, check=True, timeout=200)
    (run_dir,) = tmp_path.iterdir()
    assert len(rows(run_dir)) == 1
    assert (run_dir / "config.yaml").exists()


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that has logged its first steps and would go on for a long time."""
    run_dir = tmp_path / "endless"
    process = start(run_dir, "experiment=spark_tiny", "trainer.total_steps=100000", *SCRIPTED)
    try:
        deadline = time.monotonic() + 240
        while not ((run_dir / "metrics.jsonl").exists() and len(rows(run_dir)) >= 2):
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield process, run_dir
    finally:
        if process.poll() is None:
            process.terminate()  # which ends the ranks as well
            process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_leaves_the_run_readable(
    endless: tuple[subprocess.Popen[str], Path], sent: signal.Signals
) -> None:
    process, run_dir = endless
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.send_signal(sent)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "stopped" in output
    assert f"the same command with run_dir={run_dir} goes on from the last checkpoint" in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert len(rows(run_dir)) >= 2


def test_a_rank_that_hangs_ends_the_job_and_is_named(tmp_path: Path) -> None:
    """With what it was doing; the rank that waits for it ends too, and is not taken for the cause."""
    hanging = "rollout.backend._target_=tests.rollout.ranks_groups.Hanging"
    settings = ("experiment=spark_tiny", "parallel=dp2", *SCRIPTED, hanging, "engine.timeout_s=15")
    process = start(tmp_path / "run", *settings)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "rank 1 failed first (exit code 124): TimeoutError: rank 1: no progress in sampling for 15 s" in output
    assert re.search(r"ranks_groups.py., line \d+ in generate", output), "the stacks of the rank that hung"


def test_a_rank_that_dies_ends_the_job_and_is_named(endless: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = endless
    ranks = children(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"rank 1 failed first .*SIGKILL", output)
    assert not Path(f"/proc/{ranks[0]}").exists()
