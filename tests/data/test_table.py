from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_megatron.data.rows import Files, Hub, Rows
from spark_megatron.data.table import TableSource

ROWS = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(10)]


def table(rows: Rows | Path | list[str], **settings: Any) -> TableSource:
    given = rows if isinstance(rows, Files | Hub) else Files(paths=rows if isinstance(rows, list) else str(rows))
    defaults: dict[str, Any] = {
        "rows": given,
        "question_field": "question",
        "answer_field": "answer",
        "answer_after": None,
        "instruction": "{question} Box it.",
        "system": None,
        "verifier": "math",
        "max_broken": 0,
    }
    return TableSource(**{**defaults, **settings})


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return path


def asked(source: TableSource) -> list[str]:
    return sorted(task.question for task in source.tasks("key"))


QUESTIONS = sorted(row["question"] for row in ROWS)


def write_jsonl(folder: Path) -> Path:
    return lines(folder / "x.jsonl", [*ROWS[:5], b"\n", *ROWS[5:]])


def write_json(folder: Path) -> Path:
    path = folder / "x.json"
    path.write_text(json.dumps(ROWS, indent=1))
    return path


def write_parquet(folder: Path) -> Path:
    extra = [None, {"index": 1}] * 5
    pq.write_table(pa.Table.from_pylist([{**row, "extra_info": e} for row, e in zip(ROWS, extra, strict=True)]),
                   folder / "x.parquet", row_group_size=3)  # fmt: skip
    return folder / "x.parquet"


def write_saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return folder / "saved"


WRITERS = [write_jsonl, write_json, write_parquet, write_saved]


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_gives_the_same_tasks(tmp_path: Path, write: Any) -> None:
    source = table(write(tmp_path))
    answers = {task.question: task.answer for task in source.tasks("key")}
    assert answers == {row["question"]: row["answer"] for row in ROWS}
    assert source.fingerprint == table(write_jsonl(tmp_path)).fingerprint


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("part", "chosen"), [("[-3:]", ROWS[-3:]), ("[:2]", ROWS[:2]), ("[2:4]", ROWS[2:4])])
def test_slices(tmp_path: Path, write: Any, part: str, chosen: list[dict[str, str]]) -> None:
    assert asked(table(Path(f"{write(tmp_path)}@{part}"))) == sorted(row["question"] for row in chosen)


def test_a_list_of_files_in_several_formats_and_a_pattern(tmp_path: Path) -> None:
    first, second = lines(tmp_path / "a.jsonl", ROWS[:4]), lines(tmp_path / "b.jsonl", ROWS[4:6])
    pq.write_table(pa.Table.from_pylist(ROWS[6:]), tmp_path / "c.parquet")
    assert asked(table([str(first), f"{second}@[:1]", str(tmp_path / "c.parquet")])) == sorted(
        row["question"] for row in (*ROWS[:5], *ROWS[6:])
    )
    assert asked(table([str(tmp_path / "*.jsonl")])) == sorted(row["question"] for row in ROWS[:6])


def test_a_dataset_of_the_hub_library(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "set" / "train.parquet")
    assert asked(table(Hub(name=str(tmp_path / "set"), subset=None, split="train"))) == QUESTIONS
    part = table(Hub(name=str(tmp_path / "set"), subset=None, split="train[:3]"))
    assert asked(part) == sorted(row["question"] for row in ROWS[:3])
    with pytest.raises(ValueError, match=r"name='.*set' \(subset=None, split='test'\) could not be loaded"):
        table(Hub(name=str(tmp_path / "set"), subset=None, split="test"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.parquet").write_text("no parquet")
    (tmp_path / "x.json").write_text('{"a": 1}')
    (tmp_path / "folder").mkdir()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "dict"))
    for path, message in {
        "y.jsonl": "paths='.*y.jsonl': there is no such file",
        "*.ndjson": "there is no such file",
        "x.csv": "x.csv: is neither .jsonl, .json nor .parquet",
        "x.parquet": "x.parquet: is no parquet file",
        "x.json": "x.json: is no JSON list",
        "folder": "folder: was not written by save_to_disk",
        "dict": r"has the splits \['train'\]: name one, such as .*dict/train",
    }.items():
        with pytest.raises(ValueError, match=message):
            table(tmp_path / path)
    with pytest.raises(ValueError, match=r"paths=\[\]"):
        Files(paths=[])


BROKEN: list[tuple[Any, str]] = [
    (b"{not json\n", "not JSON"),
    (b'{"question": "\xff"}\n', "not JSON"),
    (b"[" * 100_000 + b"\n", "not JSON"),
    ({"question": "q"}, r"no field 'answer'; the line has \['question'\]"),
    ({"question": "q", "answer": float("nan")}, "neither text nor a number: nan"),
    ({"question": "q", "answer": ["7"]}, "neither text nor a number"),
    ({"question": None, "answer": "7"}, "neither text nor a number: None"),
    ({"question": " ", "answer": "7"}, "is empty"),
    ({"question": [], "answer": "7"}, "must end with the user's message"),
    (
        {"question": [{"role": role, "content": "q"} for role in ("user", "assistant")], "answer": "7"},
        "must end",
    ),
    ({"question": [{"role": "tool", "content": "q"}], "answer": "7"}, r"question\[0\] must have a role"),
    ({"question": [{"role": "user", "content": None}], "answer": "7"}, r"question\[0\].content is no text"),
]


@pytest.mark.parametrize(("row", "message"), BROKEN)
def test_broken_rows_are_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    path = lines(tmp_path / "x.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(
        ValueError, match=rf"x\.jsonl:2: .*{message}.*\(1 broken rows, and max_broken=0 may be dropped\)"
    ):
        table(path)


def test_some_broken_rows_may_be_dropped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = lines(tmp_path / "x.jsonl", [ROWS[0], b"{\n", ROWS[1], {"question": "q"}])
    assert len(table(path, max_broken=2).tasks("key")) == 2
    assert "2 broken rows are left out" in caplog.text
    assert "x.jsonl:2: not JSON" in caplog.text
    assert "x.jsonl:4: no field 'answer'" in caplog.text
    with pytest.raises(ValueError, match="2 broken rows, and max_broken=1"):
        table(path, max_broken=1)
    with pytest.raises(ValueError, match="max_broken=-1"):
        table(path, max_broken=-1)


def test_broken_rows_of_a_table_are_named_by_row(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROWS[0], {"question": "q", "answer": None}]), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet:2: field 'answer' is neither"):
        table(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet:1: no field 'question_'"):
        table(tmp_path / "x.parquet", question_field="question_")


def test_repeated_questions_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    again = {"question": "what IS  0 + 1?", "answer": "1"}
    path = lines(tmp_path / "x.jsonl", [*ROWS[:2], again, {**ROWS[1], "answer": "3"}])
    assert [(task.question, task.answer) for task in sorted(table(path).tasks("k"), key=lambda t: t.question)] == [
        ("What is 0 + 1?", "1"),
        ("What is 1 + 1?", "2"),
    ]
    assert f"1 rows repeat a question and are left out: {path}:3 (as {path}:1)" in caplog.text
    assert f"1 rows repeat a question WITH ANOTHER ANSWER and are left out: {path}:4 (as {path}:2)" in caplog.text


def test_nested_fields_and_answers_that_are_programs_tests(tmp_path: Path) -> None:
    tests = {"tests": [{"stdin": "1", "stdout": "2"}]}
    path = lines(tmp_path / "x.jsonl", [{"a.b": "q1", "reward_model": {"ground_truth": tests}}])
    (task,) = table(path, question_field="a.b", answer_field="reward_model.ground_truth").tasks("k")
    assert json.loads(task.answer) == tests
    with pytest.raises(ValueError, match="no field 'reward_model.style'"):
        table(path, question_field="a.b", answer_field="reward_model.style")


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " 2 + 2?"}]},
]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_messages(tmp_path: Path, form: str) -> None:
    plain = [*CHAT[:3], {"role": "user", "content": "And 2 + 2?"}]
    if form == "jsonl":
        path = lines(tmp_path / "x.jsonl", [{"question": CHAT, "answer": 4}])
    else:
        path = tmp_path / "x.parquet"
        pq.write_table(pa.Table.from_pylist([{"question": plain, "answer": 4}]), path)
    (task,) = table(path, system="Ignored: the row has one.").tasks("k")
    assert task.context == (("system", "Be brief."), ("user", "What is 1 + 1?"), ("assistant", "2"))
    assert task.prompt == "And 2 + 2? Box it."
    assert task.question == "user: What is 1 + 1?\n\nassistant: 2\n\nuser: And 2 + 2?"


def test_one_message_is_a_text_and_the_system_prompt_is_put_before_it(tmp_path: Path) -> None:
    message = [{"role": "user", "content": ROWS[0]["question"]}]
    one = table(lines(tmp_path / "x.jsonl", [{"question": message, "answer": "1"}])).tasks("k")
    assert one == table(lines(tmp_path / "y.jsonl", ROWS[:1])).tasks("k")
    (task,) = table(tmp_path / "y.jsonl", system="Think.").tasks("k")
    assert task.context == (("system", "Think."),)
    assert task.question == ROWS[0]["question"]
    assert task.id == one[0].id


def test_the_same_last_turn_after_another_history_is_another_task(tmp_path: Path) -> None:
    other = [*CHAT[:2], {"role": "assistant", "content": "3"}, CHAT[3]]
    path = lines(tmp_path / "x.jsonl", [{"question": chat, "answer": 4} for chat in (CHAT, other)])
    first, second = table(path).tasks("k")
    assert first.id != second.id
    assert first.prompt == second.prompt


def test_without_an_instruction_the_question_is_the_prompt(tmp_path: Path) -> None:
    tasks = table(lines(tmp_path / "x.jsonl", ROWS), instruction=None).tasks("k")
    assert all(task.prompt == task.question for task in tasks)


def test_fingerprints_tell_content_and_prompts_apart(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", ROWS)
    changed = [table(path), table(path, system="s"), table(path, instruction=None), table(Path(f"{path}@[1:]"))]
    assert len({source.fingerprint for source in changed}) == 4


def test_no_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are none"):
        table(lines(tmp_path / "x.jsonl", []))


def test_the_libraries_of_other_formats_stay_unloaded(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", ROWS)
    source = (
        f"import sys\nfrom spark_megatron.data.rows import Files\nprint(len(list(Files(paths={str(path)!r}).read([]))))"
    )
    loaded = "print({'datasets', 'pyarrow', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{source}\n{loaded}"], capture_output=True, text=True, check=True)
    assert done.stdout == "10\nset()\n"
