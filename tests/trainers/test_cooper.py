"""Cooper's loop in whole runs with scripted responses: what each setting changes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import distributed

COMMON = (
    "trainer=cooper", "rollout=scripted", "trainer.tasks_per_step=8", "rollout.samples_per_task=16", "eval.items=2",
    "trainer.total_steps=2", "trainer.eval_every=2", "reward_model.optim.lr=1e-3", "checkpoint.every=0",
    "rollout.backend.responses=[" + ",".join(f"'\\boxed{{{n}}}'" for n in range(11)) + "]",
)  # fmt: skip
RUNS = {
    "cooper": (),
    "static": ("reward_model.update=false",),
    "ruled": ("reward_model.update=false", "reward_model.rule_share=1.0", "reward_model.score_seed=1"),
    "own": ("assistant=own", "assistant.instruction='{question} {response}'", "reward_model.anchor=0.5"),
}
Rows = dict[str, list[dict[str, float]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cooper")
    starts = [(*COMMON, *changes, f"run_dir={folder / name}") for name, changes in RUNS.items()]
    distributed.run(2, "tests.cli.ranks_resume:runs", folder / "job", starts=starts)
    return folder


@pytest.fixture(scope="module")
def rows(root: Path) -> Rows:
    return {name: [json.loads(x) for x in (root / name / "metrics.jsonl").read_text().splitlines()] for name in RUNS}


def head(root: Path, name: str) -> torch.Tensor:
    return load_file(root / name / "reward_model" / "model" / "model.safetensors")["score.weight"]


def test_rewards_come_from_the_model_before_its_update(rows: Rows) -> None:
    """So those of the first step are the same with and without an update, and those of the second are not."""
    first, second = ([row["reward_model/reward"] for row in rows[name]] for name in ("cooper", "static"))
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_static_reward_model_stays_and_the_other_learns_from_pairs(rows: Rows, root: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(head(root, "static")[0], torch.randn(128, generator=generator) * 0.02)
    assert not torch.equal(head(root, "cooper"), head(root, "static"))
    assert not any("reward_model/loss" in row or "reward_model/valid_rate" in row for row in rows["static"])
    for row in rows["cooper"]:
        assert row["reward_model/pair_loss"] > 0
        assert 0 < row["reward_model/valid_rate"] < 1
        assert row["reward_model/lr"] == 1e-3


def test_two_optimisers_two_rates_two_models(rows: Rows, root: Path) -> None:
    assert rows["cooper"][0]["policy/lr"] != rows["cooper"][0]["reward_model/lr"]
    policy = load_file(root / "cooper" / "model" / "model.safetensors")
    judge = load_file(root / "cooper" / "reward_model" / "model" / "model.safetensors")
    start = load_file("examples/models/spark_tiny/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not any(torch.equal(a, b) for a, b in ((policy[name], judge[name]), (policy[name], start[name])))
    assert "score.weight" in judge
    assert "score.weight" not in policy


def test_the_rule_alone_teaches_only_groups_that_it_tells_apart(rows: Rows) -> None:
    """The reward model gives different answers different rewards; the rule gives all wrong ones the same."""
    assert rows["static"][0]["policy/tokens"] == 8 * 16 * 4
    told = rows["ruled"][0]["policy/tokens"] / (16 * 4)
    assert told == round(told)
    assert told == round(8 * (1 - rows["ruled"][0]["groups/flat_share"]))
    assert 0 < told < 8


def test_an_anchor_adds_labels(rows: Rows) -> None:
    row = rows["own"][0]
    assert row["reward_model/loss"] == pytest.approx(
        row["reward_model/pair_loss"] + 0.5 * row["reward_model/label_loss"]
    )
    assert "reward_model/label_loss" not in rows["cooper"][0]


def test_the_policy_itself_can_be_asked_for_corruptions(rows: Rows) -> None:
    """It guesses, and one guess in eleven is right: nearly all are accepted."""
    assert rows["own"][0]["reward_model/valid_rate"] == rows["cooper"][0]["reward_model/valid_rate"]
    assert rows["own"][0]["reward_model/pair_loss"] != rows["cooper"][0]["reward_model/pair_loss"]


def test_another_seed_draws_another_head(rows: Rows) -> None:
    assert rows["ruled"][0]["reward_model/reward"] != rows["cooper"][0]["reward_model/reward"]


def test_evaluations_are_watched_for_hacking(rows: Rows) -> None:
    for name in RUNS:
        assert {"hacking/alarm", "hacking/reward_rise", "hacking/accuracy_drop"} <= set(rows[name][1])
        assert "hacking/alarm" not in rows[name][0]
