import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_megatron import runtime
from spark_megatron.config import Config
from spark_megatron.eval.suite import as_json
from spark_megatron.recycle.pool import Pool
from spark_megatron.rewards.noise import LabelNoise
from spark_megatron.rollout.groups import Phase
from spark_megatron.tracking.recorder import Recorder
from spark_megatron.tracking.sinks import JsonlSink
from spark_megatron.tracking.tracker import Tracker
from spark_megatron.trainers import period, progress
from spark_megatron.trainers.state import RunState
from spark_megatron.types import EvalResult, Group, Interval, Rollout, Task, Verdict
from tests.settings import typed

BEFORE = EvalResult(
    solve=Interval(0.25, (0.1, 0.5), 20),
    judge_one=Interval(0.5, (0.3, 0.7), 20),
    judge_pair=Interval(0.625, (0.4, 0.8), 20),
    reflect=Interval(0.3, (0.15, 0.5), 20),
    counts={"solve/ok": 19, "solve/unparsed": 1},
    judging={"judge_pair/swap_consistency": 0.75},
)
AFTER = EvalResult(*[Interval(0.75, (0.5, 0.9), 20)] * 4, counts={"solve/ok": 20})


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    (tmp_path / "run").mkdir()
    return typed(tmp_path, "eval.max_new_tokens=7", "objective.status_rewards.unparsed=-0.5")


def test_evaluations_are_kept_side_by_side(cfg: Config) -> None:
    path = Path(cfg.run_dir) / "eval.json"
    progress.write_evaluation(cfg, "before", as_json(BEFORE))
    before = {
        "solve": {"acc": 0.25, "ci": [0.1, 0.5], "n": 20},
        "judge_one": {"acc": 0.5, "ci": [0.3, 0.7], "n": 20},
        "judge_pair": {"acc": 0.625, "ci": [0.4, 0.8], "n": 20},
        "reflect": {"acc": 0.3, "ci": [0.15, 0.5], "n": 20},
        "counts": {"solve/ok": 19, "solve/unparsed": 1},
        "judging": {"judge_pair/swap_consistency": 0.75},
    }
    assert json.loads(path.read_text()) == {"before": before}
    progress.write_evaluation(cfg, "after", {"step": 3, **as_json(AFTER)})
    same = {"acc": 0.75, "ci": [0.5, 0.9], "n": 20}
    after = dict.fromkeys(("solve", "judge_one", "judge_pair", "reflect"), same)
    after = {"step": 3, **after, "counts": {"solve/ok": 20}, "judging": {}}
    assert json.loads(path.read_text()) == {"before": before, "after": after}
    assert [file.name for file in path.parent.iterdir()] == ["eval.json"]


def test_only_rank_zero_writes(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "rank", lambda: 1)
    progress.write_evaluation(cfg, "before", as_json(BEFORE))
    assert not (Path(cfg.run_dir) / "eval.json").exists()


def test_evaluation_is_greedy_and_asks_nothing_about_nothing(cfg: Config) -> None:
    asked: list[tuple[int, dict[str, Any]]] = []

    def sample(tasks: Sequence[Task], **settings: Any) -> Phase:
        asked.append((len(tasks), settings))
        return Phase([], (0,))

    def run(sample: Any) -> EvalResult:
        assert sample([]) == []
        sample([Task("q", "solve", "p", "1", "math", "p")] * 3)
        return BEFORE

    parts: Any = SimpleNamespace(sample=sample, suite=SimpleNamespace(run=run))
    assert progress.evaluate(parts, cfg) is BEFORE
    assert asked == [(3, {"n": 1, "temperature": 0.0, "max_new_tokens": 7, "seed": ("eval",)})]


def checked(kind: Any, *verdicts: Verdict) -> Group:
    rollouts = tuple(Rollout((i, 3), (-0.1, -0.2), f"text {i}", "stop", 0) for i in range(len(verdicts)))
    return Group(Task(f"{kind}1", kind, "prompt", "8", "math", "question"), (1, 2), rollouts, verdicts)


def logged(
    cfg: Config, groups: list[Group], stats: dict[str, dict[str, float]], error: float, noise: float = 0.0
) -> dict[str, Any]:
    run_dir = Path(cfg.run_dir)
    track = Tracker(
        sinks=[JsonlSink(path=run_dir / "metrics.jsonl")],
        recorder=Recorder(path=run_dir / "rollouts.jsonl", groups=4),
        total_steps=2,
    )
    pool = Pool(max_size=None)
    pool.add([groups[0].task] * 3)
    phases = [Phase(groups[:1], (6, 2)), Phase([*groups[1:], replace(groups[0], rollouts=(), verdicts=())], (4, 4))]
    turns = [{"handoff_s": 0.25, "probe_max_abs": error}, {"handoff_s": 0.5, "probe_max_abs": error / 2}]
    parts: Any = SimpleNamespace(
        track=track,
        pool=pool,
        phases=phases,
        stream=SimpleNamespace(metrics=lambda: {"data/epoch": 0.5}),
        hybrid=SimpleNamespace(turns=turns),
        label_noise=LabelNoise(right_to_wrong=noise, wrong_to_right=0.0),
        tokenizer=SimpleNamespace(decode=lambda tokens, skip_special_tokens: "".join(map(chr, tokens))),
    )
    with track.step(1):
        progress.log_step(parts, cfg, groups, stats)
    assert parts.phases == parts.hybrid.turns == [], "the next step's come anew"
    track.close()
    (row,) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert isinstance(row, dict)
    return row


def compared(tokens: int, distance: float, largest: float) -> dict[str, float]:
    """Sums of an update on fresh samples."""
    sums = {"tokens": tokens, "abs": distance, "k3": 0.0, "ratio": tokens, "ratio_squared": tokens, "outside": 0.0}
    return {f"mismatch_{name}@0": value for name, value in sums.items()} | {"max_mismatch_abs@0": largest}


def test_a_step_tells_of_rollouts_and_updates(cfg: Config) -> None:
    groups = [
        checked("solve", Verdict("ok", 1.0, "8"), Verdict("unparsed")),
        checked("judge_one", Verdict("ok", 1.0, "Yes"), Verdict("ok", 1.0, "Yes")),
    ]
    stats = {
        "policy": {"loss": 0.5, "kl": 0.1, **compared(tokens=30, distance=0.6, largest=0.3)},
        "reward_period": {"loss": -0.25, "kl": 0.2, **compared(tokens=10, distance=0.4, largest=0.1)},
    }
    row = logged(cfg, groups, stats, error=2e-5)
    expected = {
        "reward/solve": 0.25,  # the unread one earns what objective.status_rewards says
        "reward/judge_one": 1.0,
        "status/solve/unparsed": 1,
        "groups/flat_share": 0.5,
        "policy/loss": 0.5,
        "policy/kl": 0.1,
        "reward_period/loss": -0.25,
        "reward_period/kl": 0.2,
        "mismatch/mean_abs": 1.0 / 40,  # over the tokens of both periods, not the mean of their means
        "mismatch/max_abs": 0.3,
        "mismatch/effective_share": 1.0,
        "pool/size": 3.0,
        "handoff/probe_max_abs": 2e-5,
        "handoff/handoff_s": 0.75,
        "rollout/imbalance": 1.5,
        "rollout/too_long": 1,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in row if "mismatch" in name and not name.startswith("mismatch/")]
    recorded = [json.loads(line) for line in (Path(cfg.run_dir) / "rollouts.jsonl").read_text().splitlines()]
    assert len(recorded) >= 2


def test_a_step_tells_how_its_judges_judged(cfg: Config) -> None:
    text = "so \\boxed{No}"
    logprobs = [-0.5 if char in "No" and i > 3 and text[i - 1] in "{N" else 0.0 for i, char in enumerate(text)]
    said_no = Rollout(tuple(map(ord, text)), tuple(logprobs), text, "stop", 0)
    task = Task("j", "judge_one", "prompt", "No", "choice", "question", "q", ("8",), ("Yes", "No"))
    judged = Group(task, (1,), (said_no, said_no), (Verdict("ok", 1.0, "No"), Verdict("unparsed")))
    row = logged(cfg, [checked("solve", Verdict("ok", 1.0, "8")), judged], {"policy": {"loss": 0.5}}, error=0.0)
    p = 1 - math.exp(-1.0)  # of "yes": two tokens of exp(-1/2) each spell the other verdict
    expected = {"failure_rate": 0.5, "yes_rate": 0.0, "accuracy_wrong": 0.5, "brier": p**2, "ece": p}
    assert {name: row[f"judge_one/{name}"] for name in expected} == pytest.approx(expected)
    assert not [name for name in row if name.startswith("label_noise/")]


def test_a_step_with_label_noise_says_how_much(cfg: Config) -> None:
    flipped = Verdict("ok", 0.0, "8", flipped=True)
    groups = [checked("solve", flipped, *[Verdict("ok", 1.0, "8")] * 3, Verdict("ok", 0.0, "7"))]
    row = logged(cfg, groups, {"policy": {"loss": 0.5}}, error=0.0, noise=0.2)
    assert (row["label_noise/right_to_wrong"], row["label_noise/wrong_to_right"]) == (0.25, 0.0)
    (recorded,) = [json.loads(line) for line in (Path(cfg.run_dir) / "rollouts.jsonl").read_text().splitlines()]
    assert [rollout.get("flipped") for rollout in recorded["rollouts"]] == [True, None, None, None, None]


def test_only_training_sees_noise(cfg: Config) -> None:
    """The same sampling gives flipped verdicts to a period and true ones to an evaluation."""
    truth = checked("solve", Verdict("ok", 1.0, "8"), Verdict("ok", 0.0, "7"))

    def evaluated(sample: Any) -> Any:
        return sample([truth.task])

    parts: Any = SimpleNamespace(
        sample=lambda tasks, **_: Phase([truth], (4,)),
        phases=[],
        hybrid=SimpleNamespace(generating=nullcontext),
        label_noise=LabelNoise(right_to_wrong=1.0, wrong_to_right=1.0),
        suite=SimpleNamespace(run=evaluated),
    )
    (trained,) = period.rollouts(parts, cfg, [truth.task], (0, "solve"), lambda _: nullcontext())  # type: ignore[arg-type]
    assert [(v.reward, v.flipped) for v in trained.verdicts] == [(0.0, True), (1.0, True)]
    assert progress.evaluate(parts, cfg) == [truth]  # type: ignore[comparison-overlap]


def test_a_step_without_a_reward_period_or_sampled_tokens(cfg: Config) -> None:
    row = logged(cfg, [checked("solve", Verdict("ok", 1.0, "8"))], {"policy": {"loss": 0.5}}, error=math.nan)
    assert row["policy/loss"] == 0.5
    assert row["handoff/probe_max_abs"] is None
    assert not [name for name in row if name.startswith(("reward_period/", "mismatch/"))]


def test_an_evaluation_between_steps_is_logged_with_the_best_so_far(cfg: Config) -> None:
    results, metrics = [BEFORE, AFTER, BEFORE], {}
    parts: Any = SimpleNamespace(
        sample=None, suite=SimpleNamespace(run=lambda _: results.pop(0)), track=SimpleNamespace(log=metrics.update)
    )
    state = RunState(cfg, parts)
    judging = {"eval_judging/judge_pair/swap_consistency": 0.75}
    figures = {**judging, "eval/solve": 0.25, "eval/judge_one": 0.5, "eval/judge_pair": 0.625, "eval/reflect": 0.3}
    for best in (0.25, 0.75, 0.75):
        progress.log_evaluation(parts, cfg, state)
        assert metrics["eval/best_solve"] == state.best == best
    assert metrics == {**figures, "eval/best_solve": 0.75}
