"""Reading a run directory: whatever is there, and a list of what is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from spark_megatron.report.examples import Examples, find_examples
from spark_megatron.tracking.jsonl import read_jsonl, read_steps
from spark_megatron.types import TASK_KINDS, Interval

T = TypeVar("T")
Evals = dict[str, dict[str, Interval]]
EVALS = ("before", "after")


@dataclass(frozen=True)
class Series:
    """One metric over the steps that have it; both lists have the same length."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Run:
    """All that a report knows. ``missing`` says in words which input is absent or unreadable."""

    name: str
    series: Mapping[str, Series] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    """Unix seconds at the end of each step."""
    evals: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    """By "before" or "after", then by what was tested."""
    config: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, Examples] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def named(self, prefix: str) -> dict[str, Series]:
        """The series whose name starts with ``prefix``, by the rest of their name."""
        return {name.removeprefix(prefix): s for name, s in self.series.items() if name.startswith(prefix)}


def load_run(directory: Path) -> Run:
    """Read metrics.jsonl, rollouts.jsonl, eval.json and config.yaml of ``directory``; none of them has to exist.

    Raises ValueError where ``directory`` itself does not.
    """
    if not directory.is_dir():
        raise ValueError(f"there is no run directory {str(directory)!r}; pass the output directory of a training run")
    missing: list[str] = []

    def read(name: str, what: str, reader: Callable[[Path], T], empty: T) -> T:
        path = directory / name
        if not path.exists():
            missing.append(f"{name} does not exist: {what}.")
            return empty
        try:
            return reader(path)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, yaml.YAMLError) as error:
            missing.append(f"{name} cannot be read: {what}. ({error})")
            return empty

    rows: list[dict[str, Any]] = read("metrics.jsonl", "no curves, times or status counts", read_steps, [])
    if not rows and not missing:
        missing.append("metrics.jsonl has no finished step yet.")
    done = max((int(row["step"]) for row in rows), default=0)
    evals: Evals = read(
        "eval.json", "no figures from before and after the training", lambda path: _read_evals(path, done), {}
    )
    if evals:
        missing += [f"eval.json has no {when!r} part (yet)." for when in EVALS if when not in evals]
    config: dict[str, Any] = read("config.yaml", "the settings of the run are unknown", _read_config, {})
    folder, named = directory.resolve().name, str(config.get("name") or "")
    return Run(
        name=folder if named in folder else f"{named} {folder}",
        series=_to_series(rows),
        times=[float(row["time"]) for row in rows if row.get("time") is not None],
        evals=evals,
        config=config,
        examples=read("rollouts.jsonl", "no example rollouts", lambda path: find_examples(read_jsonl(path)), {}),
        missing=missing,
    )


def _to_series(rows: list[dict[str, Any]]) -> dict[str, Series]:
    """Columns from rows. Values that are null (they were not finite) are left out."""
    series: dict[str, Series] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                column = series.setdefault(name, Series([], []))
                column.steps.append(int(row["step"]))
                column.values.append(float(value))
    return series


def _read_evals(path: Path, done: int) -> Evals:
    """The evaluations but for an "after" of fewer than the ``done`` steps: the run was made longer since."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("after", {}).get("step", done) < done:
        del stored["after"]
    evals: Evals = {}
    for when in EVALS:
        entries = stored.get(when) or {}
        names = [kind for kind in TASK_KINDS if kind in entries] + [n for n in entries if n not in TASK_KINDS]
        found = {name: interval for name in names if (interval := _interval(entries[name])) is not None}
        if found:
            evals[when] = found
    return evals


def _interval(entry: Any) -> Interval | None:
    """The interval of one entry; None for what is no accuracy (status counts, say) or was not tested."""
    if not isinstance(entry, Mapping) or entry.get("acc") is None or not entry.get("ci"):
        return None
    low, high = entry["ci"]
    return Interval(acc=float(entry["acc"]), ci=(float(low), float(high)), n=int(entry["n"]))


def _read_config(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("not a mapping of settings")
    return config
