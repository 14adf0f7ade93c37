"""The console line: plain in a file, a live bar on a (pseudo) terminal."""

import contextlib
import io
import math
import os
import pty
import re
import threading
from pathlib import Path

import pytest

from spark_megatron.tracking.console import (
    ConsoleSink,
    columns_for,
    duration,
    fitting,
    judge_accuracy,
    number,
    quantity,
    seconds,
)

METRICS = {
    "reward/solve": 0.4375,
    "reward/judge_one": 0.5,
    "reward/judge_pair": 1.0,
    "status/judge_one/ok": 30.0,
    "status/judge_pair/ok": 10.0,
    "policy/kl": 0.00123,
    "policy/entropy": 1.234,
    "tokens/per_s": 12345.0,
    "time/step": 4.2,
    "time/rollout": 2.0,
    "time/score": 0.25,
    "time/recycle": 0.05,
    "time/logprobs": 0.5,
    "time/update": 1.0,
    "time/other": 0.4,
    "time/eta": 3723.4,
}


def cells(line: str) -> list[str]:
    return line.split()


def test_a_plain_line_has_every_value_under_its_title() -> None:
    stream = io.StringIO()
    ConsoleSink(total_steps=300, every=1, stream=stream).log(12, METRICS)
    header, line = stream.getvalue().splitlines()
    values = dict(zip(cells(header), cells(line), strict=True))
    assert values == {
        "step": "12/300",
        "solve": "0.438",
        "judge": "0.625",
        "kl": "0.0012",
        "entropy": "1.234",
        "tok/s": "12.3k",
        "s/step": "4.20",
        "roll": "2.00",
        "train": "1.50",
        "hand": "-",
        "rest": "0.70",
        "eta": "1:02:03",
    }
    # Right-aligned: each title ends in the column where its value ends.
    assert [m.end() for m in re.finditer(r"\S+", header)] == [m.end() for m in re.finditer(r"\S+", line)]


def test_columns_stay_put_whatever_the_step_has() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(total_steps=3, every=1, stream=stream)
    for step, metrics in enumerate((METRICS, {"policy/kl": math.nan}, {**METRICS, "policy/kl": 123456.0}), start=1):
        sink.log(step, metrics)
    sink.close()
    text = stream.getvalue()
    assert len({len(line) for line in text.splitlines()}) == 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


@pytest.mark.parametrize(("every", "shown"), [(1, ["1", "2", "3", "4", "5", "6", "7"]), (3, ["1", "3", "6", "7"])])
def test_every_kth_step_and_the_first_and_the_last(every: int, shown: list[str]) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(total_steps=7, every=every, stream=stream)
    for step in range(1, 8):
        sink.log(step, METRICS)
    assert [cells(line)[0].split("/")[0] for line in stream.getvalue().splitlines()[1:]] == shown


def test_refuses_every_zero() -> None:
    with pytest.raises(ValueError, match=r"console\.every=0"):
        ConsoleSink(total_steps=1, every=0)


def test_a_supervised_run_has_its_own_columns() -> None:
    stream = io.StringIO()
    ConsoleSink(total_steps=10, every=1, stream=stream).log(1, {"sft/loss": 2.5, "sft/grad_norm": 0.75, "sft/lr": 1e-5})
    header, line = stream.getvalue().splitlines()
    assert cells(header) == ["step", "loss", "grad", "lr", "tok/s", "s/step", "eta"]
    assert cells(line) == ["1/10", "2.5000", "0.750", "1.0e-05", "-", "-", "-"]


def test_a_narrow_terminal_loses_details_only() -> None:
    titles = [column.title for column in fitting(columns_for(METRICS), 75)]
    assert titles == ["solve", "judge", "kl", "entropy", "tok/s", "s/step", "roll", "train", "eta"]
    assert [c.title for c in fitting(columns_for(METRICS), 5)][-1] == "eta"


def test_judge_accuracy_is_weighted_by_responses() -> None:
    assert judge_accuracy(METRICS) == (0.5 * 30 + 1.0 * 10) / 40
    assert judge_accuracy({"reward/judge_one": 0.25}) == 0.25
    assert judge_accuracy({"reward/solve": 1.0}) is None


def test_number_forms() -> None:
    assert [number(x) for x in (0.0, 0.1234567, 12.3456, -0.5, 1e-5, 123456.0, None, math.nan)] == [
        "0.0000", "0.1235", "12.35", "-0.5000", "1.0e-05", "1.2e+05", "-", "-",
    ]  # fmt: skip
    assert [seconds(x) for x in (0.0, 9.994, 42.06, 1234.4, None)] == ["0.00", "9.99", "42.1", "1234", "-"]
    assert [duration(x) for x in (0.4, 59.6, 86399.0, 200000.0, None)] == [
        "0:00:00",
        "0:01:00",
        "23:59:59",
        "2d 07h",
        "-",
    ]
    assert [quantity(x) for x in (950.0, 12345.0, 123456.0, 1.25e6, None)] == ["950", "12.3k", "123k", "1.2M", "-"]


def read_all(descriptor: int, pieces: list[bytes]) -> None:
    """Collect what a terminal gets until its other end is closed, which Linux reports as an I/O error."""
    with contextlib.suppress(OSError):
        while piece := os.read(descriptor, 4096):
            pieces.append(piece)
    os.close(descriptor)


def test_on_a_terminal_a_bar_follows_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    leader, follower = pty.openpty()
    pieces: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(leader, pieces))
    reader.start()
    with os.fdopen(follower, "w") as terminal:
        sink = ConsoleSink(total_steps=4, every=1, stream=terminal)
        sink.log(1, METRICS)
        sink.log(2, METRICS)
        sink.close()
    reader.join()
    output = b"".join(pieces).decode()
    assert "2/4" in output
    assert " 50%" in output
    assert "left 1:02:03" in output
    assert "\x1b[?25h" in output  # the cursor is visible again
