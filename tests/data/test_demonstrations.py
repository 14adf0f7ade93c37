import random
from collections import Counter
from typing import Any

import pytest

from spark_megatron.data.demonstrations import Demonstrations, Demonstrator
from spark_megatron.data.reasoning import ReasoningSource
from spark_megatron.recycle.templates import load_bank
from spark_megatron.rewards.boxed import last_boxed
from spark_megatron.types import Task

EXACT = Demonstrator(faulty_share=0.0, fault_prob=0.0, seed=0)
DEFAULTS: dict[str, Any] = {
    "bank": load_bank("concise"),
    "demonstrator": EXACT,
    "shares": {"solve": 0.4, "judge_one": 0.2, "judge_pair": 0.2, "reflect": 0.2},
    "judge_view": "answer",
    "judge_verifier": "choice",
    "reflect_cot_share": 0.5,
    "wrong_verdict_share": 0.0,
}
TASK = Task("t1", "solve", "Question: 6 + 5 - 3", "8", "math", "6 + 5 - 3")


def tasks(count: int = 400) -> list[Task]:
    source = ReasoningSource(
        dataset="chain_sum",
        params={"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 1},
        size=count,
        question_from="expression",
        instruction="{question}",
        verifier="math",
    )
    return source.tasks("demo")


def demonstrate(items: list[Task], seed: int = 0, **settings: Any) -> list[tuple[Task, str]]:
    demonstrations = Demonstrations(**{**DEFAULTS, **settings})
    rng = random.Random(seed)
    return [demonstrations(item, rng) for item in items]


def only(kind: str, seed: int = 0, **settings: Any) -> tuple[Task, str]:
    return demonstrate([TASK], seed, shares={kind: 1.0}, **settings)[0]


def test_responses_work_the_sum_out_first() -> None:
    assert only("solve") == (TASK, r"11 8 \boxed{8}")
    for seed in range(20):
        task, response = only("judge_one", seed)
        assert response == rf"11 8 \boxed{{{task.answer}}}"
        assert (task.answer == "Yes") == (task.shown == ("8",))
        task, response = only("judge_pair", seed)
        assert response == rf"11 8 \boxed{{{task.answer}}}"
        assert task.shown["AB".index(task.answer)] == "8"
        task, response = only("reflect", seed)
        assert response == r"11 8 \boxed{8}"
        assert task.answer == "8"
        assert task.shown != ("8",)


def test_single_digit_and_negative_results() -> None:
    for question, response in (("7", r"\boxed{7}"), ("1 - 5 - 0", r"-4 -4 \boxed{-4}")):
        item = Task("t", "solve", question, "0", "math", question)
        assert demonstrate([item], shares={"solve": 1.0})[0][1] == response


def test_all_of_an_exact_demonstrator_is_right() -> None:
    for task, response in demonstrate(tasks()):
        assert last_boxed(response) == task.answer


def test_mixture_of_kinds_and_balance_of_labels() -> None:
    made = demonstrate(tasks(1000) * 3)
    kinds = Counter(task.kind for task, _ in made)
    assert kinds["solve"] / len(made) == pytest.approx(0.4, abs=0.04)
    for kind, label in (("judge_one", "Yes"), ("judge_pair", "A")):
        labels = [task.answer for task, _ in made if task.kind == kind]
        assert labels.count(label) / len(labels) == pytest.approx(0.5, abs=0.07)
    reflections = [task.prompt for task, _ in made if task.kind == "reflect"]
    assert sum("Work:" in prompt for prompt in reflections) / len(reflections) == pytest.approx(0.5, abs=0.07)


def test_shown_working_ends_in_the_shown_answer() -> None:
    for seed in range(30):
        task, _ = only("judge_one", seed, judge_view="cot")
        work = task.prompt.split("Work: ")[1].split(" Correct?")[0].split(" True?")[0]
        *_, last, boxed = work.split()
        assert boxed == rf"\boxed{{{last}}}"
        assert task.shown == (last,)


def test_slips_are_systematic() -> None:
    learner = Demonstrator(faulty_share=0.3, fault_prob=1.0, seed=1)
    results = {t.question: learner.running_values(t.question, random.Random(0)) for t in tasks()}
    assert results == {q: learner.running_values(q, random.Random(9)) for q in results}
    table: dict[tuple[int, str], int] = {}
    faulty = 0
    for question, values in results.items():
        parts = question.split()
        for index in range(1, len(values)):
            step = int(parts[2 * index - 1] + parts[2 * index])
            slip = values[index] - values[index - 1] - step
            assert abs(slip) <= 2
            assert table.setdefault((values[index - 1], str(step)), slip) == slip
    faulty = sum(slip != 0 for slip in table.values())
    assert faulty / len(table) == pytest.approx(0.3, abs=0.08)
    assert results != {
        q: Demonstrator(faulty_share=0.3, fault_prob=1.0, seed=2).running_values(q, random.Random(0)) for q in results
    }


def test_slips_happen_with_their_probability() -> None:
    learner = Demonstrator(faulty_share=1.0, fault_prob=0.25, seed=1)
    rng = random.Random(0)
    wrong = [learner.running_values("6 + 5", rng) != [6, 11] for _ in range(2000)]
    assert sum(wrong) / 2000 == pytest.approx(0.25, abs=0.03)


def test_verdicts_follow_the_demonstrators_own_result() -> None:
    learner = Demonstrator(faulty_share=0.5, fault_prob=1.0, seed=1)
    items = tasks()
    for task, response in demonstrate(items, demonstrator=learner, shares={"judge_one": 1.0}):
        result = learner.running_values(task.question, random.Random(0))[-1]
        assert last_boxed(response) == ("Yes" if task.shown == (str(result),) else "No")
    pairs = demonstrate(items, demonstrator=learner, shares={"judge_pair": 1.0})
    for task, response in pairs:
        result = learner.running_values(task.question, random.Random(0))[-1]
        first, second = (abs(int(answer) - result) for answer in task.shown)
        assert last_boxed(response) == ("A" if first <= second else "B")
    assert any(last_boxed(response) != task.answer for task, response in pairs)


def test_share_of_wrong_verdicts() -> None:
    made = demonstrate(tasks(1000) * 2, shares={"judge_one": 0.5, "judge_pair": 0.5}, wrong_verdict_share=0.2)
    wrong = sum(last_boxed(response) != task.answer for task, response in made)
    assert wrong / len(made) == pytest.approx(0.2, abs=0.03)
    assert {last_boxed(response) for _, response in made} == {"Yes", "No", "A", "B"}


def test_same_seed_same_demonstrations() -> None:
    items = tasks(50)
    assert demonstrate(items, 3) == demonstrate(items, 3) != demonstrate(items, 4)


@pytest.mark.parametrize("question", ["12 + 3", "6+5", "6 * 5", "6 +", "", "State the answer: 6 + 5"])
def test_other_questions_are_refused(question: str) -> None:
    with pytest.raises(ValueError, match="no sum of single digits"):
        EXACT.running_values(question, random.Random(0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shares", {"solve": 0.0}),
        ("shares", {"solv": 1.0}),
        ("shares", {"solve": -1.0, "reflect": 2.0}),
        ("judge_view", "all"),
        ("reflect_cot_share", 1.5),
        ("wrong_verdict_share", -0.5),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Demonstrations(**{**DEFAULTS, name: value})
    with pytest.raises(ValueError, match="faulty_share=2"):
        Demonstrator(faulty_share=2, fault_prob=0, seed=0)
