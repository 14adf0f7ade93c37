"""Numbers and words about a run: what it was, where its time went, what became of its rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from spark_megatron.report.load import Run
from spark_megatron.report.style import PHASE_COLOURS
from spark_megatron.tracking.metrics import STATUSES
from spark_megatron.types import TASK_KINDS

_SETTINGS = {
    "Configuration": "name",
    "Trainer": "trainer.loop._target_",
    "Model": "model.path",
    "Precision": "model.dtype",
    "Seed": "seed",
    "Layout": "parallel",
}


@dataclass(frozen=True)
class PhaseTime:
    """A phase of the steps: mean seconds over all steps, share of all step time, and total seconds."""

    phase: str
    mean: float
    share: float
    total: float


def run_facts(run: Run) -> dict[str, str]:
    """What the run was and did, as label -> text. What is unknown is left out."""
    facts = {label: text for label, path in _SETTINGS.items() if (text := _setting(run.config, path))}
    step_times = run.series.get("time/step")
    if steps := sorted({s for series in run.series.values() for s in series.steps}):
        planned = _setting(run.config, "trainer.total_steps")
        facts["Steps"] = f"{len(steps)} of {planned}" if planned else str(len(steps))
    if run.times:
        began = run.times[0] - (step_times.values[0] if step_times else 0.0)
        facts["Began"] = datetime.fromtimestamp(began).strftime("%Y-%m-%d %H:%M")
        facts["Duration"] = duration(run.times[-1] - began)
    if step_times:
        facts["Time in steps"] = f"{duration(sum(step_times.values))} (median {median(step_times.values):.2f} s a step)"
    if generated := run.series.get("tokens/generated"):
        facts["Tokens generated"] = f"{sum(generated.values):,.0f}"
    if speed := run.series.get("tokens/per_s"):
        facts["Tokens per second"] = f"{median(speed.values):,.0f} (median step)"
    if flipped := label_noise(run):
        facts["Label noise"] = flipped
    if memory := run.series.get("memory/peak_rss_gb"):
        facts["Peak memory"] = f"{max(memory.values):.2f} GB resident, first rank"
    return facts


def label_noise(run: Run) -> str:
    """Which labels of the verifier were flipped on purpose, set and really (mean over the steps); "" where none."""
    parts = []
    for name, label in (("right_to_wrong", "right"), ("wrong_to_right", "wrong")):
        share = float(_setting(run.config, f"label_noise.{name}") or 0)
        series = run.series.get(f"label_noise/{name}")
        really = f" (really {100 * sum(series.values) / len(series.values):.1f} %)" if series else ""
        if share:
            parts.append(f"{100 * share:g} % of {label} answers{really}")
    return f"labels flipped on purpose in training: {', '.join(parts)}" if parts else ""


def phase_times(run: Run) -> list[PhaseTime]:
    """The phases in their usual order, then any others; nothing where no step time is known."""
    phases = {name: sum(s.values) for name, s in run.named("time/").items() if name not in ("step", "eta")}
    steps = len(run.series["time/step"].values) if "time/step" in run.series else 0
    everything = sum(phases.values())
    if not steps or not everything:
        return []
    order = [p for p in PHASE_COLOURS if p in phases] + [p for p in phases if p not in PHASE_COLOURS]
    return [PhaseTime(p, phases[p] / steps, phases[p] / everything, phases[p]) for p in order]


def status_counts(run: Run) -> dict[str, dict[str, int]]:
    """By task kind, the number of rollouts of each status over the whole run."""
    totals = {name: int(sum(s.values)) for name, s in run.named("status/").items()}
    counts: dict[str, dict[str, int]] = {}
    for kind in TASK_KINDS:
        known = [status for status in STATUSES if f"{kind}/{status}" in totals]
        of_kind: dict[str, int] = {status: totals[f"{kind}/{status}"] for status in known}
        if sum(of_kind.values()):
            counts[kind] = of_kind
    return counts


def reward_change(run: Run) -> dict[str, tuple[float, float]]:
    """By task kind, the mean training reward over the first and over the last tenth of its steps."""
    changes: dict[str, tuple[float, float]] = {}
    for kind in TASK_KINDS:
        if series := run.series.get(f"reward/{kind}"):
            tenth = max(1, len(series.values) // 10)
            changes[kind] = (sum(series.values[:tenth]) / tenth, sum(series.values[-tenth:]) / tenth)
    return changes


def duration(seconds: float) -> str:
    """Seconds in words: ``42 s``, ``12 min 05 s``, ``3 h 07 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _setting(config: Mapping[str, Any], path: str) -> str:
    """The text of the setting at the dotted ``path``, a group as a list of its values; "" where there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "" if value is None else str(value)
