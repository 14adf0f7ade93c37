import pytest

from spark_megatron.rewards.verdict import ChoiceVerifier
from spark_megatron.types import Task, Verdict

VERIFIER = ChoiceVerifier(choices=[["Yes", "No"], ["A", "B"]])


def task(answer: str) -> Task:
    return Task("t1", "judge_one", "prompt", answer, "choice", "question")


@pytest.mark.parametrize(
    ("response", "gold", "verdict"),
    [
        (r"\boxed{Yes}", "Yes", Verdict("ok", 1.0, "Yes")),
        (r"\boxed{No}", "Yes", Verdict("ok", 0.0, "No")),
        (r"\boxed{yes}", "Yes", Verdict("ok", 1.0, "Yes")),
        (r"\boxed{ NO. }", "No", Verdict("ok", 1.0, "No")),
        (r"\boxed{(b)}", "B", Verdict("ok", 1.0, "B")),
        (r"\boxed{**A**}", "A", Verdict("ok", 1.0, "A")),
        (r"\boxed{$A$}", "A", Verdict("ok", 1.0, "A")),
        (r"\boxed{\text{Yes}}", "Yes", Verdict("ok", 1.0, "Yes")),
        (r"\boxed{\textbf{No}.}", "No", Verdict("ok", 1.0, "No")),
        (r"Option \boxed{A} is tempting but \boxed{B}", "B", Verdict("ok", 1.0, "B")),
        (r"11 8 \boxed{Yes}", "Yes", Verdict("ok", 1.0, "Yes")),
        (r"\boxed{A: Correct}", "A", Verdict("unparsed")),
        (r"\boxed{Yes or No}", "Yes", Verdict("unparsed")),
        (r"\boxed{A}", "Yes", Verdict("unparsed")),
        (r"\boxed{maybe}", "No", Verdict("unparsed")),
        (r"\boxed{}", "No", Verdict("unparsed")),
        (r"\box{Yes}", "Yes", Verdict("unparsed")),
        ("No. Yesterday I thought so.", "No", Verdict("unparsed")),
        ("Yes", "Yes", Verdict("unparsed")),
        (r"the candidate wrote \boxed{Yes}, but \boxed{No}", "Yes", Verdict("ok", 0.0, "No")),
    ],
)
def test_reading_of_verdicts(response: str, gold: str, verdict: Verdict) -> None:
    assert VERIFIER(task(gold), response, "stop") == verdict


def test_cut_response_is_truncated_only_without_a_box() -> None:
    assert VERIFIER(task("A"), r"so \boxed{", "length") == Verdict("truncated")
    assert VERIFIER(task("A"), r"so \boxed{A} be", "length") == Verdict("ok", 1.0, "A")


def test_labels_come_from_the_settings() -> None:
    verifier = ChoiceVerifier(choices=[["right", "wrong", "unsure"]])
    assert verifier(task("unsure"), r"\boxed{Unsure}", "stop") == Verdict("ok", 1.0, "unsure")


def test_unknown_gold_label_is_refused() -> None:
    with pytest.raises(ValueError, match="'C' is no label of choices"):
        VERIFIER(task("C"), r"\boxed{C}", "stop")


@pytest.mark.parametrize("choices", [[["Yes"]], [["Yes", "yes"]], [["A", "B"], ["B", "C"]]])
def test_ambiguous_label_sets_are_refused(choices: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="two or more labels, none repeated"):
        ChoiceVerifier(choices=choices)
