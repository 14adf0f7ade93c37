"""From the runs of a study to its table: means over seeds with intervals, and paired comparisons."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from spark_megatron.tracking.jsonl import read_steps

SKILLS = ("solve", "judge_one", "judge_pair", "reflect")

FIGURES = (*SKILLS, "right_to_wrong", "wrong_to_right", "tokens", "seconds", "steps")
"""What a run is described by: held-out accuracies (``reflect``: after a round of judging and repairing the own answer),
the answers that this round broke and mended, tokens sampled in training, seconds of its steps, and their number."""


@dataclass(frozen=True)
class Outcome:
    """A finished run: its figures by name, and the accuracies of the start model."""

    method: str
    seed: int
    figures: Mapping[str, float]
    before: Mapping[str, float]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval (NaN for a single seed)."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """The mean difference to another method over the same seeds, and the p value of a paired t test (two-sided)."""

    difference: float
    p: float


def is_finished(run_dir: Path) -> bool:
    """Whether a run has its last result."""
    path = run_dir / "eval.json"
    return path.is_file() and "after" in json.loads(path.read_text(encoding="utf-8"))


def read_outcome(method: str, seed: int, run_dir: Path) -> Outcome:
    """What a finished run came to."""
    evaluated = json.loads((run_dir / "eval.json").read_text(encoding="utf-8"))
    after, rows = evaluated["after"], read_steps(run_dir / "metrics.jsonl")
    figures = {skill: after[skill]["acc"] for skill in SKILLS}
    figures |= {name: after["counts"][f"flips/{name}"] for name in ("right_to_wrong", "wrong_to_right")}
    figures |= {
        "tokens": sum(row["tokens/generated"] for row in rows),
        "seconds": sum(row["time/step"] for row in rows),
        "steps": float(len(rows)),
    }
    return Outcome(method, seed, figures, {skill: evaluated["before"][skill]["acc"] for skill in SKILLS})


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and Student's t interval of independent runs."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Estimate(mean, math.nan, math.nan, n)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = float(stats.t.ppf(0.975, n - 1)) * spread
    return Estimate(mean, mean - half, mean + half, n)


def compare(values: Mapping[int, float], others: Mapping[int, float]) -> Comparison:
    """``values`` minus ``others``, by seed. With fewer than two common seeds, or equal differences, p is NaN."""
    differences = [values[seed] - others[seed] for seed in sorted(values.keys() & others.keys())]
    mean = math.fsum(differences) / len(differences) if differences else math.nan
    if len(differences) < 2 or len(set(differences)) == 1:
        return Comparison(mean, math.nan)
    return Comparison(mean, float(stats.ttest_1samp(differences, 0.0).pvalue))


def summary(outcomes: Sequence[Outcome], baseline: str) -> dict[str, dict[str, dict[str, float]]]:
    """Per method and figure: mean, low, high, n, and for skills the difference to ``baseline`` and its p.

    The start model, which is the same for all seeds, comes first under the name "untrained".
    """
    found: dict[str, dict[str, dict[str, float]]] = {
        "untrained": {skill: {**vars(estimate([outcomes[0].before[skill]]))} for skill in SKILLS}
    }
    values: dict[str, dict[str, dict[int, float]]] = {}
    for outcome in outcomes:
        for name in FIGURES:
            values.setdefault(outcome.method, {}).setdefault(name, {})[outcome.seed] = outcome.figures[name]
    for method, figures in values.items():
        found[method] = {name: {**vars(estimate(list(of.values())))} for name, of in figures.items()}
        if baseline in values and method != baseline:
            for skill in SKILLS:
                found[method][skill] |= vars(compare(figures[skill], values[baseline][skill]))
    return found
