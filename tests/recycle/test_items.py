import random

import pytest

from spark_megatron.recycle.candidates import Candidate, answered, candidates
from spark_megatron.recycle.pairwise import pairwise_task
from spark_megatron.recycle.pointwise import pointwise_task
from spark_megatron.recycle.reflection import reflection_task
from spark_megatron.recycle.templates import VIEWS, View, load_bank
from spark_megatron.types import Group, Rollout, Task, Verdict

SOURCE = Task("q1", "solve", "Solve: 6 + 5 - 3", "7777", "math", "6 + 5 - 3")
RIGHT = Candidate("11 \\boxed{7777.0}", "7777.0", True)
WRONG = Candidate("12 \\boxed{9}", "9", False)
CONCISE, FULL = load_bank("concise"), load_bank("full")


def test_pointwise_label_says_whether_the_answer_is_right() -> None:
    for candidate in (RIGHT, WRONG):
        for seed in range(50):
            task = pointwise_task(
                SOURCE, candidate, part=FULL.judge_one, view="answer", verifier="choice", rng=random.Random(seed)
            )
            template = next(
                t for t in FULL.judge_one.templates if t.text.split("\n")[-1] == task.prompt.split("\n")[-1]
            )
            assert task.answer == template.labels[0 if candidate.right else 1]
            assert (task.kind, task.verifier, task.source, task.question) == ("judge_one", "choice", "q1", "6 + 5 - 3")
            assert task.shown == (candidate.answer,)


def test_concise_pointwise_prompt() -> None:
    task = pointwise_task(SOURCE, WRONG, part=CONCISE.judge_one, view="answer", verifier="choice", rng=random.Random(1))
    assert task.prompt == "Judge: 6 + 5 - 3 = 9 \\boxed{}"
    assert task.answer == "No"


def test_pairwise_order_is_the_callers_and_the_label_follows_it() -> None:
    for first, second, label in ((RIGHT, WRONG, "A"), (WRONG, RIGHT, "B")):
        for seed in range(50):
            task = pairwise_task(
                SOURCE,
                first,
                second,
                part=CONCISE.judge_pair,
                view="answer",
                verifier="choice",
                rng=random.Random(seed),
            )
            assert task.answer == label
            assert task.shown == (first.answer, second.answer)
            assert task.prompt == f"Compare: 6 + 5 - 3 (A) {first.answer} (B) {second.answer} \\boxed{{}}"
            assert (task.kind, task.verifier, task.source, task.question) == ("judge_pair", "choice", "q1", "6 + 5 - 3")


def test_a_pair_needs_one_right_and_one_wrong_solution() -> None:
    for right in (True, False):
        one, other = Candidate("a \\boxed{1}", "1", right), Candidate("b \\boxed{2}", "2", right)
        with pytest.raises(ValueError, match="q1: a pair needs one right and one wrong"):
            pairwise_task(
                SOURCE, one, other, part=CONCISE.judge_pair, view="answer", verifier="choice", rng=random.Random(0)
            )


def test_equal_answers_never_form_a_pair() -> None:
    twin = Candidate("other text \\boxed{$7777.0$}", "$7777.0$", False)
    with pytest.raises(ValueError, match="q1: a pair needs two different answers"):
        pairwise_task(
            SOURCE, RIGHT, twin, part=CONCISE.judge_pair, view="answer", verifier="choice", rng=random.Random(0)
        )


def test_reflection_keeps_gold_answer_and_verifier() -> None:
    task = reflection_task(SOURCE, WRONG, part=CONCISE.reflect, view="cot", rng=random.Random(0))
    assert (task.kind, task.answer, task.verifier, task.source) == ("reflect", "7777", "math", "q1")
    assert task.prompt == "Fix: 6 + 5 - 3 = 12 \\boxed{9} \\boxed{}"


def test_right_solutions_are_never_called_wrong() -> None:
    told = [t.text.split("\n")[-1] for t in FULL.reflect.templates if t.told_wrong]
    last_lines = {
        candidate.right: {
            reflection_task(SOURCE, candidate, part=FULL.reflect, view="answer", rng=random.Random(seed)).prompt
            for seed in range(300)
        }
        for candidate in (RIGHT, WRONG)
    }
    assert not any(prompt.endswith(line) for prompt in last_lines[True] for line in told)
    assert all(any(prompt.endswith(line) for prompt in last_lines[False]) for line in told)


@pytest.mark.parametrize("bank", [CONCISE, FULL])
@pytest.mark.parametrize("view", VIEWS)
def test_the_gold_answer_is_only_ever_shown_as_a_candidate(bank: object, view: View) -> None:
    bank = load_bank("full") if bank is FULL else CONCISE
    for seed in range(30):
        rng = random.Random(seed)
        judge = pointwise_task(SOURCE, WRONG, part=bank.judge_one, view=view, verifier="choice", rng=rng)
        reflect = reflection_task(SOURCE, WRONG, part=bank.reflect, view=view, rng=rng)
        pair = pairwise_task(SOURCE, RIGHT, WRONG, part=bank.judge_pair, view=view, verifier="choice", rng=rng)
        assert "7777" not in judge.prompt
        assert "7777" not in reflect.prompt
        assert pair.prompt.count("7777") == (2 if view == "both" else 1)


def test_ids_tell_items_apart_and_repeat_for_equal_ones() -> None:
    def make(candidate: Candidate, seed: int) -> str:
        rng = random.Random(seed)
        return pointwise_task(SOURCE, candidate, part=CONCISE.judge_one, view="answer", verifier="c", rng=rng).id

    assert make(RIGHT, 1) == make(RIGHT, 1) != make(WRONG, 1)
    assert make(RIGHT, 1).startswith("q1/judge_one/")


def test_candidates_by_verdict() -> None:
    verdicts = (
        Verdict("ok", 1.0, "7777"),
        Verdict("ok", 0.0, "9"),
        Verdict("ok", 0.5, "8"),
        Verdict("unparsed"),
        Verdict("truncated"),
        Verdict("timeout", parsed="2^2^2"),
        Verdict("error"),
    )
    rollouts = tuple(Rollout((1,), (0.0,), f"text {i}", "stop", 0) for i in range(len(verdicts)))
    right, wrong = candidates(Group(SOURCE, (1,), rollouts, verdicts))
    assert right == [Candidate("text 0", "7777", True)]
    assert wrong == [
        Candidate("text 1", "9", False),
        Candidate("text 3", None, False),
        Candidate("text 4", None, False),
    ]
    assert answered(wrong) == wrong[:1]
    with pytest.raises(ValueError, match="7 rollouts but 0 verdicts"):
        candidates(Group(SOURCE, (1,), rollouts))
