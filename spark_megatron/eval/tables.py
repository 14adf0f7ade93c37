"""The figures of an evaluation as tables: for the terminal, as rows for a CSV file, and with the paper's columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from spark_megatron.eval.benchmarks import MATH, Judged
from spark_megatron.eval.test_time import Stage, equal_cost, flips
from spark_megatron.types import Interval

PAPER: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Table 1": {
        "Avg-M": ("MathVista", "MathVision", "WeMath", "MathVerse", "DynaMath", "LogicVista", "MMK12"),
        "Avg-R": ("RB2", "RB2-Math", "VL-RB", "VL-RB-Math"),
    },
    "Table 2": {
        "Avg-M": ("AIME24", "AIME25", "AMC23", "GSM8k", "MATH-500", "MMLU-STEM"),
        "Avg-R": ("RB2", "RB2-Math"),
    },
}
"""The columns of SPARK's tables (arXiv 2509.22624), with the average after each part; "All" is the mean of all."""


@dataclass(frozen=True)
class Solved:
    """How a set of questions was solved: greedily, with several answers, and by each method of test time."""

    greedy: Interval
    at_k: Mapping[str, Interval] = field(default_factory=dict)
    methods: Mapping[str, Sequence[Stage]] = field(default_factory=dict)


def paper_rows(
    solved: Mapping[str, Solved], judged: Mapping[str, Judged]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Of each of the paper's tables that something was measured for: a row for greedy answers, and for reflection."""
    methods = ["greedy", *(["reflect"] if any("reflect" in result.methods for result in solved.values()) else [])]
    found = {}
    for table, parts in PAPER.items():
        if {column for columns in parts.values() for column in columns} & {*solved, *judged}:
            found[table] = {method: paper_row(table, paper_values(solved, judged, method)) for method in methods}
    return found


def paper_row(table: str, values: Mapping[str, float]) -> dict[str, float | None]:
    """The columns of one of the paper's tables from accuracies by column, in [0, 1]; None for what was not measured.

    Averages are unweighted, and there only where all of their members are.
    """
    row: dict[str, float | None] = {}
    members: list[str] = []
    for average, columns in PAPER[table].items():
        row |= {column: values.get(column) for column in columns} | {average: _mean(values, columns)}
        members += columns
    return row | {"All": _mean(values, members)}


def paper_values(solved: Mapping[str, Solved], judged: Mapping[str, Judged], method: str) -> dict[str, float]:
    """What was measured, by the paper's column; solving at the last stage of ``method`` where it ran."""
    values = {}
    for name, result in solved.items():
        stages = result.methods.get(method)
        values[name] = stages[-1].accuracy.acc if stages else result.greedy.acc
    for name, verdicts in judged.items():
        values[name] = verdicts.accuracy.acc
        if MATH in verdicts.subsets:
            values[f"{name}-{MATH}"] = verdicts.subsets[MATH].acc
    return values


def records(solved: Mapping[str, Solved], judged: Mapping[str, Judged]) -> list[dict[str, Any]]:
    """One flat row per figure. Tokens and calls are totals over all questions; flips count against the first stage."""
    rows: list[dict[str, Any]] = []
    for name, result in solved.items():
        rows.append(_record(name, "greedy", result.greedy))
        rows += [_record(name, measure, interval) for measure, interval in result.at_k.items()]
        for method, stages in result.methods.items():
            for stage in stages:
                worse, better = flips(stages[0], stage)
                spent = {"effort": stage.effort, "calls": stage.calls, "tokens": stage.tokens}
                told = {"right_to_wrong": worse, "wrong_to_right": better}
                rows.append(_record(name, method, stage.accuracy) | spent | told)
        if len(result.methods) > 1:
            tokens, found = equal_cost(result.methods)
            for method, interval in found.items():
                if interval is not None:
                    rows.append(_record(name, f"{method} at equal tokens", interval) | {"tokens": tokens})
    for name, verdicts in judged.items():
        rows.append(_record(name, "judging", verdicts.accuracy))
        rows += [_record(f"{name}-{subset}", "judging", interval) for subset, interval in verdicts.subsets.items()]
    return rows


RECORD = (
    "set", "measure", "effort", "accuracy", "low", "high", "n", "calls", "tokens", "right_to_wrong", "wrong_to_right",
)  # fmt: skip
"""The fields of a record."""


def as_json(solved: Mapping[str, Solved], judged: Mapping[str, Judged]) -> dict[str, Any]:
    """All figures as plain data, not-a-number as null."""
    return {
        "figures": [{k: None if _unknown(v) else v for k, v in row.items()} for row in records(solved, judged)],
        "judging": {name: {k: v for k, v in asdict(j).items() if isinstance(v, int)} for name, j in judged.items()},
    }


def solving_table(name: str, result: Solved) -> Table:
    """Accuracy in per cent with its interval, flips (right to wrong, wrong to right), and cost per question."""
    table = _table(f"{name}: solving", "", "effort", "accuracy", "95 %", "r>w", "w>r", "calls", "tokens")
    table.add_row("greedy", "", *_percent(result.greedy))
    for measure, interval in result.at_k.items():
        table.add_row(measure, "", *_percent(interval))
    for method, stages in result.methods.items():
        table.add_section()
        for stage in stages:
            costs = [f"{spent / max(1, len(stage.rewards)):.1f}" for spent in (stage.calls, stage.tokens)]
            changes = map(str, flips(stages[0], stage))
            table.add_row(method, str(stage.effort), *_percent(stage.accuracy), *changes, *costs)
    if len(result.methods) > 1:
        tokens, found = equal_cost(result.methods)
        table.add_section()
        for method, known in found.items():
            if known is not None:
                cost = f"{tokens / max(1, known.n):.1f}"
                table.add_row(f"{method}, equal cost", "", *_percent(known), "", "", "", cost)
    return table


def judging_table(judged: Mapping[str, Judged]) -> Table:
    """Accuracy in per cent per benchmark and subset, with what could not be read or was left out."""
    table = _table("judging", "", "accuracy", "95 %", "items", "unread", "left out")
    for name, verdicts in judged.items():
        known = (f"{verdicts.unread} of {verdicts.verdicts}", str(verdicts.left_out))
        table.add_row(name, *_percent(verdicts.accuracy), str(verdicts.accuracy.n), *known)
        for subset, interval in verdicts.subsets.items():
            table.add_row(f"  {subset}", *_percent(interval), str(interval.n))
    return table


def paper_table(table: str, rows: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Rows of one of the paper's tables as columns, in per cent; a dash for what was not measured."""
    drawn = _table(f"columns of the SPARK paper's {table}, %", "", *rows)
    for column in next(iter(rows.values())):
        values = [row[column] for row in rows.values()]
        drawn.add_row(column, *("-" if value is None else f"{100 * value:.1f}" for value in values))
    return drawn


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    return table


def _record(name: str, measure: str, interval: Interval) -> dict[str, Any]:
    low, high = interval.ci
    return {"set": name, "measure": measure, "accuracy": interval.acc, "low": low, "high": high, "n": interval.n}


def _percent(interval: Interval) -> tuple[str, str]:
    low, high = interval.ci
    return f"{100 * interval.acc:.1f}", f"{100 * low:.1f}-{100 * high:.1f}"


def _mean(values: Mapping[str, float], columns: Sequence[str]) -> float | None:
    found = [values[column] for column in columns if column in values]
    return sum(found) / len(found) if len(found) == len(columns) else None


def _unknown(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
