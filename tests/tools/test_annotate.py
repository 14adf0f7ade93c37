"""Hybrid annotation: what both agree on is kept, whatever happens in between."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.data.annotation import agreed, read_judgement
from spark_megatron.data.triples import TripleFile
from spark_megatron.types import Verdict
from tests.data.chat_server import server
from tools import annotate

RIGHT, WRONG, UNREADABLE = "so \\boxed{4}", "so \\boxed{5}", "four"
ROWS = [
    {"question": f"{name}?", "reference_answer": "4", "completion": text}
    for name, text in (("a yes", RIGHT), ("b no", WRONG), ("c no", RIGHT), ("d yes", WRONG), ("e yes", UNREADABLE))
]


@pytest.mark.parametrize(
    ("reply", "judgement"),
    [
        ("Final Judgment: Yes", True),
        ("Yes, it seems. But no.\nFinal Judgment: **No**", False),
        ("I do not know; nothing is noted", None),
        ("", None),
    ],
)
def test_the_last_word_is_the_judgement(reply: str, judgement: bool | None) -> None:
    assert read_judgement(reply) is judgement


@pytest.mark.parametrize(
    ("rule", "judged", "label"),
    [
        (Verdict("ok", 1.0), True, True),
        (Verdict("ok", 0.0), False, False),
        (Verdict("ok", 1.0), False, None),
        (Verdict("ok", 0.0), True, None),
        (Verdict("ok", 0.5), True, None),
        (Verdict("ok", 1.0), None, None),
        (Verdict("timeout"), False, None),
        (Verdict("unparsed"), False, None),
    ],
)
def test_a_label_needs_both(rule: Verdict, judged: bool | None, label: bool | None) -> None:
    assert agreed(rule, judged) is label


def judge(body: dict[str, Any], _number: int) -> tuple[int, str]:
    """Says what the question says."""
    question = body["messages"][1]["content"].split("?")[0]
    return (500, "down") if "down" in question else (200, f"Final Judgment: {question.rsplit(' ', 1)[1]}")


def run(folder: Path, url: str, patch: pytest.MonkeyPatch, *more: str) -> None:
    names = [str(folder / name) for name in ("in.jsonl", "out.jsonl")]
    options = ["--url", url, "--model", "m", "--retries", "0", "--chunk", "2", *more]
    patch.setattr(sys, "argv", ["annotate.py", *names, *options])
    annotate.main()


def labels(folder: Path) -> list[tuple[str, int]]:
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return [(row["question"], row["label"]) for row in rows]


def test_agreed_labels_become_triples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    with server(judge) as (url, requests, _):
        run(tmp_path, url, monkeypatch)
        assert len(requests) == 5  # the sixth row is the first again
    assert requests[0]["temperature"] == 0.0
    assert labels(tmp_path) == [("a yes?", 1), ("b no?", 0)]
    said = capsys.readouterr()
    assert "1 right, 1 wrong; 3 not agreed on" in said.out
    assert "4/5 asked, 2 agreed so far" in said.err
    assert len(TripleFile(path=str(tmp_path / "out.jsonl")).take(0, 2, 0)) == 2


def test_a_run_that_was_stopped_asks_only_about_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are decided; the line of a third was not written to its end."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with server(judge) as (url, requests, _):
        run(tmp_path, url, monkeypatch)
        log = tmp_path / "out.jsonl.decisions"
        whole = log.read_text()
        log.write_text("\n".join(whole.splitlines()[:2]) + "\n" + whole.splitlines()[2][:9])
        (tmp_path / "out.jsonl").unlink()
        run(tmp_path, url, monkeypatch)
        assert [r["messages"][1]["content"][9] for r in requests[5:]] == ["c", "d", "e"]
        run(tmp_path, url, monkeypatch)
        assert len(requests) == 8
    assert labels(tmp_path) == [("a yes?", 1), ("b no?", 0)]


def test_what_was_not_answered_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ROWS[0], {**ROWS[1], "question": "down no?"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with server(judge) as (url, requests, _):
        for asked in (2, 3):
            with pytest.raises(SystemExit, match="1 were not answered|none of 1 requests"):
                run(tmp_path, url, monkeypatch)
            assert len(requests) == asked
    assert labels(tmp_path) == [("a yes?", 1)]


def test_a_row_without_a_field_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text('{"question": "q", "completion": "c"}\n')
    with pytest.raises(SystemExit, match=r"in\.jsonl:1: no field 'reference_answer'"):
        run(tmp_path, "http://127.0.0.1:1/v1", monkeypatch)
