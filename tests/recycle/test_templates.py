import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.templates import VIEWS, Bank, Part, fill, load_bank, parse_bank
from spark_megatron.rewards.verdict import ChoiceVerifier
from spark_megatron.types import Task, Verdict

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
            assert re.search(r"\\f?box(?!ed\{\})", template.text) is None
            assert set(template.layouts) == set(VIEWS)


@pytest.mark.parametrize("name", BANKS)
def test_a_judge_that_obeys_its_prompt_is_read(name: str) -> None:
    """Each label, in the box that the prompt asks for, is what the checker of that very task reads."""
    verifier = ChoiceVerifier(choices=[["Yes", "No"], ["A", "B"]])
    for part in parts(load_bank(name))[:2]:
        for template in part.templates:
            for label in template.labels:
                task = Task("t", "judge_one", "p", label, "choice", "q", labels=template.labels)
                for said in (label, label.casefold(), f"({label})", f"**{label}**", f"\\text{{{label}}}"):
                    assert verifier(task, f"So \\boxed{{{said}}}.", "stop") == Verdict("ok", 1.0, label)


def test_sizes_and_forms_of_the_small_bank() -> None:
    concise = load_bank("concise")
    assert all(len(part.templates) == 1 for part in parts(concise))
    assert all(len(template.text) < 60 for part in parts(concise) for template in part.templates)
    assert {t.told_wrong for t in concise.reflect.templates} == {False}
    assert [t.labels for part in parts(concise)[:2] for t in part.templates] == [("Yes", "No"), ("A", "B")]


def test_sizes_and_forms_of_the_full_bank() -> None:
    full = load_bank("full")
    assert Counter(t.labels for t in full.judge_one.templates) == {("Yes", "No"): 12, ("A", "B"): 6, ("B", "A"): 6}
    # Which of the two words comes first in the text is balanced as well: its first mention, behind what is shown.
    ends = [t.text.rpartition("</")[2] for t in full.judge_one.templates if "Yes" in t.labels]
    yes_first = [re.search(r"\b(Yes|No)\b", end)[1] == "Yes" for end in ends]  # type: ignore[index]
    assert Counter(yes_first) == {True: 6, False: 6}
    assert [t.labels for t in full.judge_pair.templates] == [("A", "B")] * 20
    reflect = Counter((t.views, t.told_wrong) for t in full.reflect.templates)
    assert reflect == {(("cot",), False): 20, (("cot",), True): 10, (("answer",), False): 20, (("answer",), True): 10}


def test_the_wordings_of_the_full_bank_differ_and_hold_no_digit() -> None:
    for part in parts(load_bank("full")):
        texts = [re.sub(r"<[^>]*>|\{[a-z]*\}", "", t.text) for t in part.templates]
        assert not [text for text in texts if re.search(r"\d", text)]
        words = [set(re.findall(r"[a-z]+", text.casefold())) for text in texts]
        for i, one in enumerate(words):
            for other in words[:i]:
                assert len(one & other) / len(one | other) < 0.6
        opening_with_the_question = [t.text.index("{question}") < 40 for t in part.templates]
        assert 0.1 < sum(opening_with_the_question) / len(texts) < 0.9
        question_last = [
            t.text.index("{question}") > max(t.text.find(f) for f in ("{shown}", "{b}")) for t in part.templates
        ]
        assert 0.2 < sum(question_last) / len(texts) < 0.6
        assert 3 * min(map(len, texts)) < max(map(len, texts))  # some brief, some long


def test_views_of_a_candidate() -> None:
    (template,) = load_bank("concise").judge_one.templates
    candidate = Candidate("11 8 \\boxed{8}", "8", True)
    assert template.show(candidate, "answer") == "8"
    assert template.show(candidate, "cot") == "11 8 \\boxed{8}"
    assert template.show(candidate, "both") == "11 8 \\boxed{8} Answer: 8"
    unread = Candidate("I give up", None, False)
    assert template.show(unread, "cot") == "I give up"
    with pytest.raises(ValueError, match="needs a final answer"):
        template.show(unread, "answer")


def test_drawing_keeps_to_the_view_and_to_what_may_be_told() -> None:
    part, rng = load_bank("full").reflect, random.Random(0)
    silent = [t for t in part.templates if "cot" in t.views and not t.told_wrong]
    assert {t.text for t in silent} == {part.draw(rng, "cot", allow_told_wrong=False).text for _ in range(500)}
    assert len({part.draw(rng, "answer").text for _ in range(500)}) == 30


def test_dealing_is_even_and_repeatable() -> None:
    part = load_bank("full").judge_pair
    for n in (0, 1, 19, 20, 47):
        dealt = part.deal(n, random.Random(3), "answer")
        assert dealt == part.deal(n, random.Random(3), "answer")
        counts = Counter(t.text for t in dealt)
        assert sum(counts.values()) == n
        assert all(n // 20 <= counts[t.text] <= n // 20 + 1 for t in part.templates)
    assert part.deal(20, random.Random(3), "answer") != part.deal(20, random.Random(4), "answer")


def test_unknown_bank_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown template bank 'concize'.*'concise'"):
        load_bank("concize")


def raw_bank() -> dict[str, Any]:
    layouts = {"answer": "{answer}", "cot": "{text}", "both": "{text} {answer}"}
    return {
        "fenced": False,
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
        ("reflect", {"text": "{question} {shown} {shown} \\boxed{}"}, "once each"),
        ("reflect", {"text": "{question} {shown} \\boxed{}", "views": ["answers"]}, r"views=\['answers'\]"),
        ("reflect", {"text": "{question} {shown} \\boxed{}", "views": ["cot"]}, r"each of the views \['answer'\]"),
        ("judge_one", {"labels": ["A", "B"], "text": "{question} {shown} \\boxed{} \\box{}"}, "no other form"),
        ("judge_one", {"labels": ["Yes", "No"], "text": "{question} {shown} \\boxed{Yes}"}, "must ask for"),
        (
            "judge_one",
            {"labels": ["+", "-"], "text": "{question} {shown} \\boxed{}"},
            "'\\+' in a box would not be read",
        ),
        ("judge_one", {"labels": ["Yes", "yes"], "text": "{question} {shown} \\boxed{}"}, "'Yes' in a box would not"),
    ],
)
def test_faulty_templates_are_refused(kind: str, template: object, message: str) -> None:
    raw = raw_bank()
    raw[kind]["templates"] = [template]
    with pytest.raises(ValueError, match=message) as caught:
        parse_bank(yaml.safe_dump(raw), "own.yaml")
    assert f"own.yaml: {kind}" in str(caught.value)


def test_equal_texts_are_refused() -> None:
    raw = raw_bank()
    raw["reflect"]["templates"] *= 2
    raw["reflect"]["templates"][1] = {"text": "{question}\n{shown}  \\boxed{}", "views": ["cot"]}
    with pytest.raises(ValueError, match="own.yaml: reflect: 2 templates have the same text"):
        parse_bank(yaml.safe_dump(raw), "own.yaml")


@pytest.mark.parametrize(
    "text", ["{question} <a>{shown}</b>", "<q>{question}</q> <a>{shown}", "<q>{question}</q> {shown}"]
)
def test_a_fenced_bank_has_tags_around_all_that_it_shows(text: str) -> None:
    raw = raw_bank() | {"fenced": True}
    fenced = "<q>{question}</q> <x>{a}</x> <y>{b}</y> <z>{shown}</z> \\boxed{}"
    raw["judge_pair"]["templates"][0]["text"] = fenced.replace("<z>{shown}</z> ", "")
    for kind in ("judge_one", "reflect"):
        raw[kind]["templates"][0]["text"] = fenced.replace("<x>{a}</x> <y>{b}</y> ", "")
    assert parse_bank(yaml.safe_dump(raw), "own.yaml").reflect.templates[0].tags == ["q", "z"]
    raw["judge_one"]["templates"][0]["text"] = f"{text} \\boxed{{}}"
    with pytest.raises(ValueError, match=r"own.yaml: judge_one.templates\[0\]: .* must stand between tags"):
        parse_bank(yaml.safe_dump(raw), "own.yaml")
    raw["fenced"] = False
    assert parse_bank(yaml.safe_dump(raw), "own.yaml").judge_one.templates[0].text.startswith(text)


def test_faulty_structure_is_refused() -> None:
    raw = raw_bank()
    del raw["fenced"]
    with pytest.raises(ValueError, match="own.yaml: .*fenced: true or false"):
        parse_bank(yaml.safe_dump(raw), "own.yaml")
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
