"""What a run tells about itself: metrics of each step, evaluations, and the files in its directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spark_megatron import runtime
from spark_megatron.algos import mismatch
from spark_megatron.config import Config
from spark_megatron.eval.suite import as_metrics
from spark_megatron.recycle.judging import judge_figures, judge_sums
from spark_megatron.rewards.noise import flip_figures
from spark_megatron.rollout.groups import phase_metrics
from spark_megatron.tracking.metrics import from_sums, group_sums
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.state import RunState
from spark_megatron.types import EvalResult, Group, Metrics

_LOG = logging.getLogger(__name__)


def log_step(parts: Parts, cfg: Config, groups: Sequence[Group], stats: Mapping[str, Metrics]) -> None:
    """Log a step's rollouts (the same groups on every rank) and what the update of each named period reported."""
    metrics = from_sums(group_sums(groups, earned=cfg.objective.status_rewards.table()))
    metrics |= judge_figures(judge_sums(groups, partial(parts.tokenizer.decode, skip_special_tokens=True)))
    if parts.label_noise.active:
        metrics |= flip_figures(groups)
    for period, values in stats.items():
        metrics |= {f"{period}/{name}": value for name, value in values.items() if "mismatch" not in name}
    compared = mismatch.figures(runtime.combine(stats.values()))
    metrics |= {f"mismatch/{name}": value for name, value in compared.items()}
    metrics |= {"pool/size": float(len(parts.pool)), **parts.stream.metrics(), **_turn_metrics(parts.hybrid.turns)}
    metrics |= phase_metrics(parts.phases)
    parts.phases.clear()
    parts.hybrid.turns.clear()
    parts.track.log(metrics)
    parts.track.record(groups)


def log_rewards(
    parts: Parts,
    groups: Sequence[Group],
    scored: Sequence[Sequence[float | None]],
    learned: Metrics,
    pairs: Sequence[object],
) -> None:
    """Log what a reward model gave for a step's rollouts, how that compares with the rule, and what it learned.

    "agreement" is the share of rollouts that the rule could read on which the two agree, "over_rule" how much more the
    reward model gave those than the rule.
    """
    assert parts.reward_model is not None
    judged = [
        (p, verdict)
        for values, group in zip(scored, groups, strict=True)
        for p, verdict in zip(values, group.verdicts, strict=True)
        if p is not None
    ]
    read = [(p, verdict.reward) for p, verdict in judged if verdict.status == "ok"]
    metrics = {f"reward_model/{name}": value for name, value in learned.items()}
    if learned:
        metrics["reward_model/valid_rate"] = len(pairs) / len(groups) if groups else 0.0
    if judged:
        metrics["reward_model/reward"] = sum(p for p, _ in judged) / len(judged)
        parts.reward_model.monitor.observe(metrics["reward_model/reward"])
    if read:
        metrics["reward_model/agreement"] = sum((p > 0.5) == (reward > 0.5) for p, reward in read) / len(read)
        metrics["reward_model/over_rule"] = sum(p - reward for p, reward in read) / len(read)
    parts.track.log(metrics)


def _turn_metrics(turns: Sequence[Metrics]) -> Metrics:
    """What a step's changes of turns took on rank zero: sums, but the largest difference of a probe."""
    total = runtime.combine({f"max_{k}" if k == "probe_max_abs" else k: v for k, v in turn.items()} for turn in turns)
    return {f"handoff/{name.removeprefix('max_')}": value for name, value in total.items()}


def evaluate(parts: Parts, cfg: Config) -> EvalResult:
    """The held-out suite on the current weights, greedily. A collective."""

    def sample(tasks: Sequence) -> list[Group]:
        limit = cfg.eval.max_new_tokens
        return parts.sample(tasks, n=1, temperature=0.0, max_new_tokens=limit, seed=("eval",)).groups if tasks else []

    return parts.suite.run(sample)


def log_evaluation(parts: Parts, cfg: Config, state: RunState) -> None:
    """Evaluate between two steps and log the accuracies and the best one so far at solving."""
    metrics = as_metrics(evaluate(parts, cfg))
    solve = metrics["eval/solve"]
    state.best = solve if state.best is None else max(solve, state.best)
    parts.track.log({**metrics, "eval/best_solve": state.best})
    if cfg.scored and parts.reward_model:
        hacking = parts.reward_model.monitor.evaluated(solve)
        parts.track.log(hacking)
        if hacking.get("hacking/alarm"):
            _LOG.warning(
                "the reward model is being hacked: held-out accuracy %.3f is %.3f below its best, while the reward has "
                "risen by %.3f since then; see reward_model.update, reward_model.rule_share and kl_schedule",
                solve,
                hacking["hacking/accuracy_drop"],
                hacking["hacking/reward_rise"],
            )


def write_evaluation(cfg: Config, when: str, figures: Mapping[str, Any]) -> None:
    """Put one evaluation ("before" or "after") into eval.json, which is whole at any moment."""
    if runtime.rank():
        return
    path = Path(cfg.run_dir) / "eval.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(known | {when: figures}, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
