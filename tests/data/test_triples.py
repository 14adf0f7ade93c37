"""Labelled triples: from a file, pass after pass, and from the demonstrator."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.data.demonstrations import Demonstrator
from spark_megatron.data.reasoning import ReasoningSource
from spark_megatron.data.triples import DemonstratedTriples, Triple, TripleFile
from spark_megatron.rewards.math import MathVerifier
from spark_megatron.types import Task


def save(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(i: int, **changes: Any) -> dict[str, Any]:
    return {"question": f"q{i}", "reference_answer": i, "completion": f"c{i}", "label": i % 2} | changes


def test_a_pass_has_every_triple_once_and_the_next_another_order(tmp_path: Path) -> None:
    triples = TripleFile(path=save(tmp_path / "a.jsonl", *map(row, range(10))))
    drawn = [triple for part in range(5) for triple in triples.take(part, 4, 0)]  # the third part crosses into pass two
    assert sorted(t.question for t in drawn[:10]) == sorted(t.question for t in drawn[10:])
    assert len({t.question for t in drawn[:10]}) == 10
    assert drawn[:10] != drawn[10:]
    assert next(t for t in drawn if t.question == "q3") == Triple("q3", "3", "c3", True)


def test_a_part_depends_on_its_number_and_the_seed_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", *map(row, range(10)))
    assert TripleFile(path=path).take(3, 4, 1) == TripleFile(path=path).take(3, 4, 1)
    assert TripleFile(path=path).take(0, 10, 1) != TripleFile(path=path).take(0, 10, 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"label": 2}, "label=2: must be 0 or 1"), ({"label": "yes"}, "label=yes"), ({"completion": None}, "completion")],
)
def test_a_row_that_cannot_be_meant_is_refused_with_its_place(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = save(tmp_path / "a.jsonl", row(0), row(1, **changes))
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{told}"):
        TripleFile(path=path)


def test_demonstrated_labels_are_what_the_rule_says() -> None:
    source = ReasoningSource(
        dataset="chain_sum", params={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}, size=300,
        question_from="expression", instruction="{question}", system=None, verifier="math",
    )  # fmt: skip
    triples = DemonstratedTriples(source=source, demonstrator=Demonstrator(slip_prob=0.6))
    drawn = triples.take(0, 200, 0)
    for triple in drawn:
        task = Task("t", "solve", "", triple.reference, "math", triple.question)
        assert MathVerifier(symbolic=None)(task, triple.completion, "stop").reward == triple.label
    assert 0.5 < Counter(t.label for t in drawn)[True] / 200 < 0.75
    assert triples.take(0, 200, 0) == drawn != triples.take(1, 200, 0)
