from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.data.mixture import MixtureSource, shared_out
from spark_megatron.data.rows import Files
from spark_megatron.data.table import TableSource


def source(folder: Path, name: str, numbers: range, **settings: Any) -> TableSource:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"q": f"What is {i}?", "a": i}) + "\n" for i in numbers))
    defaults: dict[str, Any] = {
        "question_field": "q",
        "answer_field": "a",
        "answer_after": None,
        "instruction": f"{name}: {{question}}",
        "system": name,
        "verifier": name,
        "max_broken": 0,
    }
    return TableSource(rows=Files(paths=str(path)), **{**defaults, **settings})


def counts(mixture: MixtureSource, key: str) -> Counter[str]:
    return Counter(task.verifier for task in mixture.tasks(key))


def test_without_weights_every_task_comes_once(tmp_path: Path) -> None:
    mixture = MixtureSource(
        sources={"a": source(tmp_path, "a", range(30)), "b": source(tmp_path, "b", range(30, 40))}, weights=None
    )
    tasks = mixture.tasks("1")
    assert sorted(int(task.answer) for task in tasks) == list(range(40))
    assert tasks == mixture.tasks("1") != mixture.tasks("2")
    assert {(t.verifier, t.context, t.prompt.split(":")[0]) for t in tasks} == {
        ("a", (("system", "a"),), "a"),
        ("b", (("system", "b"),), "b"),
    }
    assert len({task.verifier for task in tasks[:10]}) == 2  # mixed, not one after the other


def test_weights_share_a_pass_out(tmp_path: Path) -> None:
    sources = {"a": source(tmp_path, "a", range(30)), "b": source(tmp_path, "b", range(30, 40))}
    mixture = MixtureSource(sources=sources, weights={"b": 3, "a": 1})
    assert counts(mixture, "1") == {"a": 10, "b": 30}
    again = Counter(task.id for task in mixture.tasks("1") if task.verifier == "b")
    assert set(again.values()) == {3}  # a small source goes round evenly
    seen = {task.id for key in range(20) for task in mixture.tasks(str(key)) if task.verifier == "a"}
    assert len(seen) == 30  # of a large one, each pass has another part


def test_a_question_of_two_sources_is_taken_from_the_first(tmp_path: Path) -> None:
    sources = {"a": source(tmp_path, "a", range(10)), "b": source(tmp_path, "b", range(5, 15))}
    assert counts(MixtureSource(sources=sources, weights=None), "1") == {"a": 10, "b": 5}
    weighed = MixtureSource(sources=sources, weights={"a": 1, "b": 2})
    assert counts(weighed, "1") == {"a": 5, "b": 10}
    assert {int(task.answer) for task in weighed.tasks("1") if task.verifier == "b"} == set(range(10, 15))
    hidden = {"a": source(tmp_path, "a", range(10)), "b": source(tmp_path, "b", range(10))}
    with pytest.raises(ValueError, match=r"sources\.b: all of its questions"):
        MixtureSource(sources=hidden, weights={"a": 1, "b": 1}).tasks("1")


def test_faults_are_named(tmp_path: Path) -> None:
    one = {"a": source(tmp_path, "a", range(3))}
    with pytest.raises(ValueError, match="sources={}"):
        MixtureSource(sources={}, weights=None)
    with pytest.raises(ValueError, match=r"weights={'b': 1}: must name exactly the sources \['a'\]"):
        MixtureSource(sources=one, weights={"b": 1})
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be greater than 0"):
            MixtureSource(sources=one, weights={"a": weight})


def test_fingerprint(tmp_path: Path) -> None:
    a, b = source(tmp_path, "a", range(3)), source(tmp_path, "b", range(3, 6))
    made = [
        MixtureSource(sources={"a": a, "b": b}, weights=None),
        MixtureSource(sources={"a": a}, weights=None),
        MixtureSource(sources={"a": a, "b": b}, weights={"a": 1, "b": 1}),
        MixtureSource(sources={"a": a, "b": b}, weights={"a": 1, "b": 2}),
    ]
    assert len({mixture.fingerprint for mixture in made}) == 4
    same = MixtureSource(sources={"a": a, "b": b}, weights={"b": 2, "a": 1})
    assert same.fingerprint == made[3].fingerprint


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [(10, [1, 1], [5, 5]), (10, [1, 2], [3, 7]), (1, [1, 1, 1], [1, 0, 0]), (7, [0.5, 0.25, 0.25], [3, 2, 2])],
)
def test_whole_shares(total: int, weights: list[float], shares: list[int]) -> None:
    assert shared_out(total, weights) == shares
