"""One line per step, with columns that the eye can run down."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from spark_megatron.tracking.metrics import STATUSES, weighted_mean
from spark_megatron.tracking.sinks import Sink

HEADER_EVERY = 25
_GAP = "  "
Value = Callable[[Mapping[str, float]], float | None]


@dataclass(frozen=True)
class Column:
    """A right-aligned column: its title, its width in characters, and how its text comes from a step's metrics."""

    title: str
    width: int
    text: Callable[[Mapping[str, float]], str]
    detail: bool = False
    """Left out, the last one first, where the terminal is too narrow."""


class ConsoleSink(Sink):
    """Prints a line for every ``every``-th step, the first and the last; ``total_steps`` is the length of the run.

    On a terminal a progress bar stays below the lines. Anywhere else (a log file, a batch job) the lines are plain
    text without control characters. Step times are split into roll (rollout), train (logprobs and update), hand
    (weight hand-off) and rest (all others). Columns: those of SFT where the first step
    has ``sft/`` metrics, else those of reinforcement learning. A dash means that the step has no such value.
    """

    def __init__(self, *, total_steps: int, every: int, stream: TextIO | None = None) -> None:
        if every < 1:
            raise ValueError(f"console.every={every} must be at least 1 (a line for every step)")
        self._stream = stream or sys.stdout
        self._total, self._every = total_steps, every
        self._lines = 0
        self._columns: tuple[Column, ...] = ()
        self._console = Console(file=self._stream, highlight=False)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = _progress(self._console)
            self._bar = self._progress.add_task("steps", total=total_steps, eta="-")
            self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        first = not self._columns
        if first:
            self._columns = columns_for(metrics)
        if first or step % self._every == 0 or step == self._total:
            self._print_line(step, metrics)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, eta=duration(metrics.get("time/eta")))
            self._progress.refresh()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _print_line(self, step: int, metrics: Mapping[str, float]) -> None:
        counter = f"{step}/{self._total}"
        width = max(len("step"), 2 * len(str(self._total)) + 1)
        columns = self._columns
        if self._progress is not None:
            columns = fitting(columns, self._console.width - width)
        if self._lines % HEADER_EVERY == 0:
            self._put(_join("step".rjust(width), [c.title.rjust(c.width) for c in columns]), "bold")
        self._lines += 1
        self._put(_join(counter.rjust(width), [c.text(metrics).rjust(c.width) for c in columns]), "")

    def _put(self, line: str, style: str) -> None:
        if self._progress is not None:
            self._console.print(Text(line, style=style), no_wrap=True, overflow="crop")
        else:
            print(line, file=self._stream, flush=True)


def columns_for(metrics: Mapping[str, float]) -> tuple[Column, ...]:
    """The columns of a run whose first step has these metrics."""
    if any(name.startswith("sft/") for name in metrics):
        return (
            Column("loss", 8, lambda m: number(m.get("sft/loss"))),
            Column("grad", 7, lambda m: number(m.get("sft/grad_norm"), digits=3)),
            Column("lr", 8, lambda m: number(m.get("sft/lr"))),
            *_SPEED,
            _ETA,
        )
    return (
        Column("solve", 5, lambda m: number(m.get("reward/solve"), digits=3)),
        Column("judge", 5, lambda m: number(judge_accuracy(m), digits=3)),
        Column("kl", 7, lambda m: number(m.get("policy/kl"))),
        Column("entropy", 7, lambda m: number(m.get("policy/entropy"), digits=3)),
        *_SPEED,
        *(_phase_column(title, phases) for title, phases in _PHASES.items()),
        Column("rest", 5, lambda m: seconds(_rest(m)), detail=True),
        _ETA,
    )


def fitting(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """The columns that fit into ``width`` characters, leaving out details from the right."""
    kept = list(columns)
    while sum(c.width + len(_GAP) for c in kept) > width and any(c.detail for c in kept):
        kept.remove([c for c in kept if c.detail][-1])
    return tuple(kept)


def judge_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Mean reward over all judge rollouts of the step, both forms, by their number; None without any."""
    pairs = [
        (metrics[f"reward/{kind}"], sum(metrics.get(f"status/{kind}/{s}", 0.0) for s in STATUSES) or 1.0)
        for kind in ("judge_one", "judge_pair")
        if f"reward/{kind}" in metrics
    ]
    return weighted_mean(pairs) if pairs else None


def number(value: float | None, digits: int = 4) -> str:
    """A fixed-point number, in exponent form where it would lose its meaning, a dash for None or NaN."""
    if value is None or math.isnan(value):
        return "-"
    if value and (abs(value) < 10.0 ** (1 - digits) or abs(value) >= 1e4):
        return f"{value:.1e}"
    return f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.{max(0, digits - 2)}f}"


def seconds(value: float | None) -> str:
    """Seconds in at most five characters."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def duration(value: float | None) -> str:
    """Seconds as ``h:mm:ss``, or ``3d 04h`` from two days on; a dash for None."""
    if value is None:
        return "-"
    whole = round(value)
    if whole >= 2 * 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def quantity(value: float | None) -> str:
    """A large number in at most five characters: 950, 12.3k, 1.2M."""
    if value is None:
        return "-"
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.1f}{name}" if value < 100 * unit else f"{value / unit:.0f}{name}"
    return f"{value:.0f}"


_PHASES = {"roll": ("rollout",), "train": ("logprobs", "update"), "hand": ("handoff",)}
_NAMED = {f"time/{phase}" for phases in _PHASES.values() for phase in phases} | {"time/step", "time/eta"}
_SPEED = (
    Column("tok/s", 6, lambda m: quantity(m.get("tokens/per_s"))),
    Column("s/step", 6, lambda m: seconds(m.get("time/step"))),
)
_ETA = Column("eta", 8, lambda m: duration(m.get("time/eta")))


def _phase_column(title: str, phases: tuple[str, ...]) -> Column:
    return Column(title, 5, lambda m: seconds(_sum_of(m, [f"time/{phase}" for phase in phases])), detail=True)


def _sum_of(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    found = [metrics[name] for name in names if name in metrics]
    return sum(found) if found else None


def _rest(metrics: Mapping[str, float]) -> float | None:
    return _sum_of(metrics, [name for name in metrics if name.startswith("time/") and name not in _NAMED])


def _join(counter: str, cells: Sequence[str]) -> str:
    return _GAP.join([counter, *cells])


def _progress(console: Console) -> Progress:
    # No refresh thread: the bar is drawn when a step ends, so nothing runs beside the training.
    return Progress(
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left {task.fields[eta]}"),
        console=console,
        auto_refresh=False,
    )
