"""JSON lines: what is written is read, and a kill costs at most the line that was being written."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from spark_megatron.tracking.jsonl import JsonlWriter, cut, jsonable, read_jsonl, read_steps


def write(path: Path, *rows: dict[str, object]) -> None:
    writer = JsonlWriter(path)
    for row in rows:
        writer.write(row)
    writer.close()


def test_round_trip_of_text_and_numbers(tmp_path: Path) -> None:
    row = {"text": "line\nbreak \u2028 é 数 \x00 </script>", "n": 3, "x": 0.1, "none": None, "list": [1, [True]]}
    write(tmp_path / "new" / "rows.jsonl", row, row)
    assert list(read_jsonl(tmp_path / "new" / "rows.jsonl")) == [row, row]


def test_a_lone_surrogate_survives(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", {"text": "a\ud800b"})
    assert list(read_jsonl(tmp_path / "rows.jsonl")) == [{"text": "a\ud800b"}]


def test_not_finite_is_null_and_arrays_are_plain() -> None:
    value = {"a": math.nan, "b": [math.inf, 1.0], "c": np.float32(0.5), "d": np.array([1.0, np.nan]), "e": np.int64(4)}
    assert jsonable(value) == {"a": None, "b": [None, 1.0], "c": 0.5, "d": [1.0, None], "e": 4}
    json.dumps(jsonable(value), allow_nan=False)


def test_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot write a object"):
        jsonable({"x": object()})


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_line_cut_anywhere_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, {"step": 1}, {"step": 2, "text": "é数"})
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    # Without its line feed alone the last row is whole.
    assert [row["step"] for row in read_jsonl(path)] == ([1, 2] if cut == 1 else [1])
    write(path, {"step": 3})
    assert [row["step"] for row in read_jsonl(path)] == ([1, 2, 3] if cut == 1 else [1, 3])


def test_a_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"text": "' + "x" * 200_000)
    write(path, {"step": 2})
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl: line 2 is not a JSON object"):
        list(read_jsonl(path))


def test_every_row_is_readable_while_the_file_is_open(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "rows.jsonl")
    for step in range(3):
        writer.write({"step": step})
        assert len(list(read_jsonl(tmp_path / "rows.jsonl"))) == step + 1
    writer.close()


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "run": "old"} for step in (1, 2, 3, 4, 5)))
    write(path, *({"step": step, "run": "new"} for step in (3, 4)))
    assert [(row["step"], row["run"]) for row in read_steps(path)] == [(1, "old"), (2, "old"), (3, "new"), (4, "new")]


@pytest.mark.parametrize(("step", "left"), [(0, []), (1, [1, 1]), (2, [1, 1, 2]), (3, [1, 1, 2]), (4, [1, 1, 2, 4])])
def test_what_comes_after_a_step_is_cut_off(tmp_path: Path, step: int, left: list[int]) -> None:
    path = tmp_path / "rollouts.jsonl"
    cut(path, step)
    assert not path.exists()
    write(path, *({"step": s, "text": "é"} for s in (1, 1, 2, 4)))
    cut(path, step)
    assert [row["step"] for row in read_jsonl(path)] == left
    write(path, {"step": step + 1})
    assert [row["step"] for row in read_jsonl(path)] == [*left, step + 1]


def test_a_torn_line_is_no_obstacle_to_cutting(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    cut(path, 2)
    write(path, {"step": 3})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3]
