import io
import math

import pytest
from rich.console import Console

from spark_megatron.eval.benchmarks import Judged
from spark_megatron.eval.tables import (
    RECORD,
    Solved,
    as_json,
    judging_table,
    paper_row,
    paper_rows,
    paper_table,
    paper_values,
    records,
    solving_table,
)  # fmt: skip
from spark_megatron.eval.test_time import Stage
from spark_megatron.tracking.intervals import wilson

STAGES = [Stage(0, (1.0, 0.0, 0.0, 0.0), 4, 40), Stage(1, (0.0, 1.0, 1.0, 0.0), 10, 80)]
SOLVED = Solved(wilson(1, 4), {"pass@2": wilson(2, 4)}, {"reflect": STAGES, "vote": [Stage(1, (1.0,) * 4, 4, 60)]})
JUDGED = Judged(wilson(3, 4), {"Math": wilson(1, 2)}, verdicts=16, unread=2, left_out=1)


def test_the_paper_s_own_averages() -> None:
    """The row of SPARK-7B in Table 2 and that of Qwen2.5-VL-7B in Table 1 (arXiv 2509.22624)."""
    names = ["AIME24", "AIME25", "AMC23", "GSM8k", "MATH-500", "MMLU-STEM"]
    text = dict(zip(names, [16.7, 6.7, 62.5, 93.2, 79.4, 81.1], strict=True))
    row = paper_row("Table 2", text | {"RB2": 58.8, "RB2-Math": 55.7})
    averages = {name: row[name] for name in ("Avg-M", "Avg-R", "All")}
    assert averages == pytest.approx({"Avg-M": 56.6, "Avg-R": 57.3, "All": 56.8}, abs=0.06)
    names = ["MathVista", "MathVision", "WeMath", "MathVerse", "DynaMath", "LogicVista", "MMK12"]
    vision = dict(zip(names, [68.2, 25.1, 62.1, 49.2, 53.3, 40.4, 45.1], strict=True))
    row = paper_row("Table 1", vision | {"RB2": 45.8, "RB2-Math": 38.8, "VL-RB": 47.7, "VL-RB-Math": 35.5})
    averages = {name: row[name] for name in ("Avg-M", "Avg-R", "All")}
    assert averages == pytest.approx({"Avg-M": 49.1, "Avg-R": 42.0, "All": 46.5}, abs=0.06)
    assert list(row) == [*names, "Avg-M", "RB2", "RB2-Math", "VL-RB", "VL-RB-Math", "Avg-R", "All"]


def test_what_was_not_measured_is_no_zero() -> None:
    row = paper_row("Table 2", paper_values({"GSM8k": SOLVED}, {"RB2": JUDGED}, method="greedy"))
    assert (row["GSM8k"], row["RB2"], row["RB2-Math"], row["Avg-R"]) == (0.25, 0.75, 0.5, 0.625)
    assert (row["AIME24"], row["Avg-M"], row["All"]) == (None, None, None)
    assert paper_values({"GSM8k": SOLVED}, {}, method="reflect") == {"GSM8k": 0.5}


def test_records_hold_every_figure() -> None:
    rows = {(row["set"], row["measure"], row.get("effort")): row for row in records({"s": SOLVED}, {"RB2": JUDGED})}
    assert list(rows) == [
        ("s", "greedy", None), ("s", "pass@2", None), ("s", "reflect", 0), ("s", "reflect", 1), ("s", "vote", 1),
        ("s", "reflect at equal tokens", None), ("s", "vote at equal tokens", None),
        ("RB2", "judging", None), ("RB2-Math", "judging", None),
    ]  # fmt: skip
    last = rows["s", "reflect", 1]
    assert (last["accuracy"], last["calls"], last["tokens"]) == (0.5, 10, 80)
    assert (last["right_to_wrong"], last["wrong_to_right"]) == (1, 2)
    equal = rows["s", "reflect at equal tokens", None]
    assert (equal["accuracy"], equal["tokens"]) == (pytest.approx((1 + 2) / 2 / 4), 60)
    assert all(set(row) <= set(RECORD) for row in rows.values())


def test_json_has_no_number_that_json_lacks() -> None:
    plain = as_json({"s": Solved(wilson(0, 0))}, {"RB2": JUDGED})
    assert plain["figures"][0]["accuracy"] is None
    assert plain["judging"] == {"RB2": {"verdicts": 16, "unread": 2, "left_out": 1}}
    assert not any(isinstance(v, float) and math.isnan(v) for row in plain["figures"] for v in row.values())


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    paper = paper_rows({"GSM8k": SOLVED}, {})
    assert list(paper) == ["Table 2"]
    for table in (solving_table("s", SOLVED), judging_table({"RB2": JUDGED}), paper_table("Table 2", paper["Table 2"])):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    words = [line.split() for line in text.splitlines()]
    assert ["reflect", "1", "50.0", "15.0-85.0", "1", "2", "2.5", "20.0"] in words
    assert ["vote,", "equal", "cost", "100.0", "51.0-100.0", "15.0"] in words
    assert ["RB2", "75.0", "30.1-95.4", "4", "2", "of", "16", "1"] in words
    assert ["GSM8k", "25.0", "50.0"] in words
    assert ["All", "-", "-"] in words
