import random
import re
from pathlib import Path

import pytest
import yaml

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.templates import VIEWS, Bank, Part, fill, load_bank, parse_bank

BANKS = ("concise", "full")
KINDS = ("judge_one", "judge_pair", "reflect")


def parts(bank: Bank) -> list[Part]:
    return [bank.judge_one, bank.judge_pair, bank.reflect]


def test_filling_never_looks_into_values() -> None:
    fields = {"question": "What is {answer} in {} or {question} or \\1?", "answer": "{question}"}
    assert fill("{question} | {answer} | {other} | \\boxed{}", fields) == (
        "What is {answer} in {} or {question} or \\1? | {question} | {other} | \\boxed{}"
    )


@pytest.mark.parametrize("name", BANKS)
def test_every_template_asks_for_a_box_that_is_read(name: str) -> None:
    for part in parts(load_bank(name)):
        for template in part.templates:
            assert "\\boxed{}" in template.text
            assert re.search(r"\\box(?!ed\{\})", template.text) is None
            assert set(part.layouts) == set(VIEWS)


def test_sizes_and_forms_of_the_banks() -> None:
    concise, full = map(load_bank, BANKS)
    assert all(len(part.templates) == 1 for part in parts(concise))
    assert all(len(template.text) < 60 for part in parts(concise) for template in part.templates)
    assert all(len(part.templates) >= 6 for part in parts(full))
    assert {frozenset(t.labels) for t in full.judge_one.templates} == {frozenset({"Yes", "No"}), frozenset({"A", "B"})}
    assert {t.labels for t in full.judge_pair.templates} == {("A", "B")}
    assert {t.told_wrong for t in full.reflect.templates} == {True, False}
    assert {t.told_wrong for t in concise.reflect.templates} == {False}
    assert [t.labels for part in parts(concise)[:2] for t in part.templates] == [("Yes", "No"), ("A", "B")]
    for part in parts(full):
        assert len({t.text for t in part.templates}) == len(part.templates)


def test_views_of_a_candidate() -> None:
    part = load_bank("concise").judge_one
    candidate = Candidate("11 8 \\boxed{8}", "8", True)
    assert part.show(candidate, "answer") == "8"
    assert part.show(candidate, "cot") == "11 8 \\boxed{8}"
    assert part.show(candidate, "both") == "11 8 \\boxed{8} Answer: 8"
    unread = Candidate("I give up", None, False)
    assert part.show(unread, "cot") == "I give up"
    with pytest.raises(ValueError, match="needs a final answer"):
        part.show(unread, "answer")


def test_told_wrong_templates_are_drawn_only_when_allowed() -> None:
    part, rng = load_bank("full").reflect, random.Random(0)
    assert not any(part.draw(rng, allow_told_wrong=False).told_wrong for _ in range(200))
    assert {part.draw(rng) for _ in range(500)} == set(part.templates)


def test_unknown_bank_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown template bank 'concize'.*'concise'"):
        load_bank("concize")


def raw_bank() -> dict[str, dict[str, object]]:
    layouts = {"answer": "{answer}", "cot": "{text}", "both": "{text} {answer}"}
    return {
        "judge_one": {
            "layouts": layouts,
            "templates": [{"labels": ["Yes", "No"], "text": "{question} {shown} \\boxed{}"}],
        },
        "judge_pair": {
            "layouts": layouts,
            "templates": [{"labels": ["A", "B"], "text": "{question} {a} {b} \\boxed{}"}],
        },
        "reflect": {"layouts": layouts, "templates": [{"text": "{question} {shown} \\boxed{}"}]},
    }


def test_own_bank_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(raw_bank()))
    assert load_bank(str(path)).judge_one.templates[0].labels == ("Yes", "No")


@pytest.mark.parametrize(
    ("kind", "template", "message"),
    [
        ("judge_one", {"labels": ["Yes", "No"], "text": "{question} {shown} \\box{}"}, r"must ask for .* \\boxed"),
        ("judge_one", {"labels": [True, False], "text": "{question} {shown} \\boxed{}"}, "booleans"),
        ("judge_one", {"labels": ["A", "A"], "text": "{question} {shown} \\boxed{}"}, "two different"),
        ("judge_one", {"labels": ["A", "B"], "text": "{question} \\boxed{}"}, r"must have \['question', 'shown'\]"),
        ("judge_pair", {"labels": ["A", "B"], "text": "{question} {a} {c} \\boxed{}"}, r"\['a', 'c', 'question'\]"),
        ("judge_one", {"labels": ["A", "B"], "text": "{question} {shown} {gold} \\boxed{}"}, "gold"),
        ("reflect", {"text": "{question} {shown} \\boxed{}", "told_wrong": True}, "at least one"),
        ("reflect", {"text": "{question} {shown} \\boxed{}", "toldwrong": True}, "toldwrong"),
        ("reflect", "{question} {shown} \\boxed{}", "a template is a mapping"),
    ],
)
def test_faulty_templates_are_refused(kind: str, template: object, message: str) -> None:
    raw = raw_bank()
    raw[kind]["templates"] = [template]
    with pytest.raises(ValueError, match=message) as caught:
        parse_bank(yaml.safe_dump(raw), "own.yaml")
    assert f"own.yaml: {kind}" in str(caught.value)


def test_faulty_structure_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly the entries"):
        parse_bank("judge_one: {}", "own.yaml")
    raw = raw_bank()
    raw["reflect"]["layouts"] = {"answer": "{answer}"}
    with pytest.raises(ValueError, match=r"own\.yaml: reflect: needs 'templates' and 'layouts'"):
        parse_bank(yaml.safe_dump(raw), "own.yaml")
    raw = raw_bank()
    raw["reflect"]["layouts"] = {"answer": "{answer}", "cot": "{answer}", "both": "{text} {answer}"}
    with pytest.raises(ValueError, match=r"reflect.layouts.cot: has the fields \['answer'\]"):
        parse_bank(yaml.safe_dump(raw), "own.yaml")


@pytest.mark.parametrize("name", BANKS)
def test_a_hostile_question_survives_verbatim(name: str) -> None:
    hostile = "Let f = {x}. Is {answer} or {shown}, {} or {0}, %s, \\boxed{Yes}, {a}?"
    bank = load_bank(name)
    for part in parts(bank):
        for template in part.templates:
            fields = dict.fromkeys(("shown", "a", "b"), hostile) | {"question": hostile}
            expected = re.split(r"\{(?:question|shown|a|b)\}", template.text)
            assert fill(template.text, fields) == hostile.join(expected)
