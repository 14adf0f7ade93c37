import random
from collections import Counter
from typing import Any

import pytest

from spark_megatron.data.demonstrations import Demonstrations, Demonstrator
from spark_megatron.data.reasoning import ReasoningSource
from spark_megatron.recycle.templates import load_bank
from spark_megatron.rewards.boxed import last_boxed
from spark_megatron.types import Task

EXACT = Demonstrator(slip_prob=0.0)
SLIPPING = Demonstrator(slip_prob=1.0)
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
        system=None,
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
    assert only("solve") == (TASK, r" 11 8 \boxed{ 8}")
    for seed in range(20):
        task, response = only("judge_one", seed)
        assert response == rf" 11 8 \boxed{{{task.answer}}}"
        assert (task.answer == "Yes") == (task.shown == ("8",))
        task, response = only("judge_pair", seed)
        assert response == rf" 11 8 \boxed{{{task.answer}}}"
        assert task.shown["AB".index(task.answer)] == "8"
        task, response = only("reflect", seed)
        assert response == r" 11 8 \boxed{ 8}"
        assert task.answer == "8"
        assert task.shown != ("8",)


def test_single_digit_and_negative_results() -> None:
    for question, response in (("7", r" \boxed{ 7}"), ("1 - 5 - 0", r" -4 -4 \boxed{ -4}")):
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
    # A shown working ends in a box of its own, before the empty one that asks for the answer.
    reflections = [task.prompt for task, _ in made if task.kind == "reflect"]
    assert sum(prompt.count(r"\boxed{") == 2 for prompt in reflections) / len(reflections) == pytest.approx(
        0.5, abs=0.07
    )


def test_shown_working_ends_in_the_shown_answer() -> None:
    for seed in range(30):
        task, _ = only("judge_one", seed, judge_view="cot")
        begin, end = f"Judge: {task.question} = ", r" \boxed{}"
        assert task.prompt.startswith(begin)
        assert task.prompt.endswith(end)
        work, box, boxed = task.prompt.removeprefix(begin).removesuffix(end).rpartition(r" \boxed")
        last = work.split()[-1]
        assert box + boxed == rf" \boxed{{ {last}}}"
        assert task.shown == (last,)


class Fixed(random.Random):
    """Draws the given numbers, one after another."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self._numbers = iter(numbers)

    def random(self) -> float:
        return next(self._numbers)


@pytest.mark.parametrize(
    ("question", "values"),
    [
        ("8 + 5", [8, 3]),  # the carry is forgotten
        ("1 + 9", [1, 0]),
        ("6 + 3", [6, 9]),  # nothing to carry
        ("2 - 9", [2, 7]),  # the sign is lost
        ("1 - 5", [1, 4]),
        ("0 - 4", [0, 4]),
        ("1 - 4", [1, -3]),  # a small negative number is read off the fingers
        ("1 - 4 - 5", [1, -3, -8]),  # no sign changes
        ("1 - 4 + 8", [1, -3, 5]),
        ("8 + 5 - 5", [8, 3, -2]),  # goes on from the wrong value
    ],
)
def test_slips_of_a_learner_who_always_slips(question: str, values: list[int]) -> None:
    for seed in range(3):
        assert SLIPPING.running_values(question, random.Random(seed)) == values


@pytest.mark.parametrize(
    ("question", "values"),
    [
        ("8 + 5 - 5", [8, 13, 18]),  # the borrow is forgotten
        ("6 + 4 - 1", [6, 10, 19]),
        ("9 + 9 - 8", [9, 18, 10]),  # nothing to borrow
        ("9 + 6 + 7", [9, 15, 12]),  # the carry into a second ten
        ("1 - 5 + 9", [1, -4, 5]),
        ("1 - 5 - 9", [1, -4, -13]),
    ],
)
def test_slips_at_the_second_step(question: str, values: list[int]) -> None:
    assert Demonstrator(slip_prob=0.5).running_values(question, Fixed(0.5, 0.49)) == values


def slipped(before: int, step: int) -> int:
    """An own reading of the rules: the tens stay as they were, or the minus goes."""
    exact = before + step
    if before >= 0 and exact >= 0:
        return before // 10 * 10 + exact % 10
    return abs(exact) if before >= 0 and exact <= -4 else exact


def test_slips_are_systematic() -> None:
    for task in tasks():
        values = SLIPPING.running_values(task.question, random.Random(0))
        parts = task.question.split()
        steps = [int(sign + digit) for sign, digit in zip(parts[1::2], parts[2::2], strict=True)]
        assert values[0] == int(parts[0])
        assert values[1:] == [slipped(before, step) for before, step in zip(values, steps, strict=False)]


def test_slips_happen_with_their_probability() -> None:
    learner = Demonstrator(slip_prob=0.25)
    rng = random.Random(0)
    made = Counter(tuple(learner.running_values("6 + 5", rng)) for _ in range(2000))
    assert set(made) == {(6, 11), (6, 1)}
    assert made[6, 1] / 2000 == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("kind", ["judge_one", "judge_pair", "reflect"])
def test_half_of_the_wrong_answers_are_the_demonstrators_own(kind: str) -> None:
    task = Task("t", "solve", "Question: 1 - 5", "-4", "math", "1 - 5")
    near_misses = {"-14", "-7", "-6", "-5", "-3", "-2", "-1", "6"}

    def wrong(demonstrator: Demonstrator) -> Counter[str]:
        made = demonstrate([task] * 2000, demonstrator=demonstrator, shares={kind: 1.0})
        return Counter(answer for item, _ in made for answer in item.shown if answer != "-4")

    own = wrong(SLIPPING)
    assert set(own) == near_misses | {"4"}
    assert own["4"] / own.total() == pytest.approx(0.5, abs=0.05)
    assert set(wrong(EXACT)) == near_misses


def test_verdicts_follow_the_demonstrators_own_result() -> None:
    items = tasks()
    made = demonstrate(items, demonstrator=SLIPPING, shares={"judge_one": 1.0})
    for task, response in made:
        result = SLIPPING.running_values(task.question, random.Random(0))[-1]
        assert last_boxed(response) == ("Yes" if task.shown == (str(result),) else "No")
    # Its own slip, shown to it, is taken for right.
    assert any(last_boxed(response) == "Yes" and task.answer == "No" for task, response in made)
    pairs = demonstrate(items, demonstrator=SLIPPING, shares={"judge_pair": 1.0})
    for task, response in pairs:
        result = SLIPPING.running_values(task.question, random.Random(0))[-1]
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
    with pytest.raises(ValueError, match="slip_prob=2"):
        Demonstrator(slip_prob=2)
