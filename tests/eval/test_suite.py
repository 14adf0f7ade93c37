import dataclasses
from collections.abc import Callable, Sequence

import pytest

from spark_megatron.eval.suite import Suite, as_json, as_metrics
from spark_megatron.recycle.templates import load_bank
from spark_megatron.rewards.math import MathVerifier
from spark_megatron.rewards.scoring import score_groups
from spark_megatron.rewards.verdict import ChoiceVerifier
from spark_megatron.tracking.intervals import wilson
from spark_megatron.types import EvalResult, Group, Interval, Rollout, Task

VERIFIERS = {
    "math": MathVerifier(symbolic=None),
    "choice": ChoiceVerifier(choices=[["Yes", "No"], ["A", "B"]]),
}
TASKS = [Task(f"q{i}", "solve", f"Solve: {i} + {i}", str(2 * i), "math", f"{i} + {i}") for i in range(10)]
GOLD = {task.question: task.answer for task in TASKS}

Answer = Callable[[Task], str]


class Player:
    """A model that answers by kind of task: with a fixed text, or with what a function of the task says in a box.

    ``calls`` has the tasks of every call, in order.
    """

    def __init__(self, **answers: Answer | str) -> None:
        self.answers = answers
        self.calls: list[list[Task]] = []

    def __call__(self, tasks: Sequence[Task]) -> list[Group]:
        self.calls.append(list(tasks))
        groups = []
        for task in tasks:
            answer = self.answers[task.kind]
            text = answer if isinstance(answer, str) else f"\\boxed{{{answer(task)}}}"
            groups.append(Group(task, (1,), (Rollout((1,), (0.0,), text, "stop", 0),)))
        return score_groups(groups, VERIFIERS)


def gold(task: Task) -> str:
    return GOLD[task.question]


def wrong(task: Task) -> str:
    return str(int(GOLD[task.question]) + 5)


def honest(task: Task) -> str:
    """The true verdict on a single answer."""
    return "Yes" if task.shown == (GOLD[task.question],) else "No"


def honest_pair(task: Task) -> str:
    return "AB"[task.shown.index(GOLD[task.question])]


def suite(tasks: Sequence[Task] = TASKS, rounds: int = 1) -> Suite:
    return Suite.build(tasks, bank=load_bank("concise"), judge_verifier="choice", rounds=rounds)


def run(rounds: int = 1, tasks: Sequence[Task] = TASKS, **answers: Answer | str) -> tuple[EvalResult, Player]:
    perfect = {"solve": gold, "judge_one": honest, "judge_pair": honest_pair, "reflect": gold}
    player = Player(**{**perfect, **answers})
    return suite(tasks, rounds).run(player), player


def accuracies(result: EvalResult) -> tuple[float, ...]:
    return (result.solve.acc, result.judge_one.acc, result.judge_pair.acc, result.reflect.acc)


def flips(result: EvalResult) -> tuple[int, int]:
    return result.counts["flips/right_to_wrong"], result.counts["flips/wrong_to_right"]


def test_judge_items_are_balanced_and_show_bare_answers() -> None:
    made = suite()
    assert made.solve == tuple(TASKS)
    assert [task.answer for task in made.judge_one] == ["No", "Yes"] * 5
    for source, item in zip(TASKS, made.judge_one, strict=True):
        (answer,) = item.shown
        assert (answer == source.answer) == (item.answer == "Yes")
        assert item.prompt == f"Judge: {source.question} = {answer} \\boxed{{}}"
        assert (item.kind, item.verifier, item.source) == ("judge_one", "choice", source.id)


def test_pairs_are_shown_in_both_orders_next_to_each_other() -> None:
    pairs = suite().judge_pair
    assert len(pairs) == 20
    for source, first, second in zip(TASKS, pairs[::2], pairs[1::2], strict=True):
        assert first.source == second.source == source.id
        assert first.shown == second.shown[::-1]
        assert (first.answer, second.answer) == ("A", "B")
        assert first.shown[0] == second.shown[1] == source.answer
        assert first.shown[0] != first.shown[1]
        assert first.prompt == f"Compare: {source.question} (A) {first.shown[0]} (B) {first.shown[1]} \\boxed{{}}"


def test_the_items_of_a_suite_are_always_the_same() -> None:
    assert suite() == suite()


def test_a_perfect_model() -> None:
    result, player = run()
    assert accuracies(result) == (1.0, 1.0, 1.0, 1.0)
    assert result.counts == {
        "solve/ok": 10,
        "judge_one/ok": 10,
        "judge_pair/ok": 20,
        "flips/right_to_wrong": 0,
        "flips/wrong_to_right": 0,
    }
    # Its own answers are judged and accepted, none is repaired.
    assert [len(tasks) for tasks in player.calls] == [10, 10, 20, 10, 0]


def test_a_model_that_is_always_wrong() -> None:
    result, _ = run(
        solve=wrong,
        judge_one=lambda task: {"Yes": "No", "No": "Yes"}[honest(task)],
        judge_pair=lambda task: {"A": "B", "B": "A"}[honest_pair(task)],
        reflect=wrong,
    )
    assert accuracies(result) == (0.0, 0.0, 0.0, 0.0)
    assert flips(result) == (0, 0)


def test_a_model_that_always_says_yes() -> None:
    result, player = run(**dict.fromkeys(("solve", "judge_one", "judge_pair", "reflect"), lambda _: "Yes"))
    assert accuracies(result) == (0.0, 0.5, 0.0, 0.0)
    # "Yes" names neither of two answers; as the result of a sum it is read, and wrong.
    assert result.counts["judge_pair/unparsed"] == 20
    assert "judge_pair/ok" not in result.counts
    assert result.counts["solve/ok"] == 10
    assert flips(result) == (0, 0)
    assert player.calls[-1] == []


@pytest.mark.parametrize("letter", ["A", "B"])
def test_a_model_that_always_takes_one_side(letter: str) -> None:
    result, _ = run(judge_pair=lambda _: letter)
    assert result.judge_pair.acc == 0.5
    assert result.judging["judge_pair/position_bias"] == {"A": 1.0, "B": -1.0}[letter]
    assert result.judging["judge_pair/swap_consistency"] == 0.0


def test_always_yes_on_an_odd_number_of_tasks() -> None:
    result, _ = run(tasks=TASKS[:5], judge_one=lambda _: "Yes")
    assert result.judge_one == wilson(2, 5)


def test_intervals_count_a_pair_of_orders_once() -> None:
    result, _ = run(
        tasks=TASKS[:4],
        solve=lambda task: gold(task) if task.id in ("q0", "q2") else wrong(task),
        judge_pair=lambda task: honest_pair(task) if task.source == "q1" else "A",
        judge_one=lambda _: "No",
    )
    half = (0.15003898, 0.84996102)  # Wilson's interval of 2 out of 4
    for interval in (result.solve, result.judge_one):
        assert (interval.acc, interval.n) == (0.5, 4)
        assert interval.ci == pytest.approx(half)
    # q1 is right in both orders, the other three in one of two: 5 of 8 responses, 2.5 of 4 observations.
    assert result.judge_pair == wilson(2.5, 4)
    assert result.judge_pair.acc == 0.625


def test_rejected_answers_are_replaced_by_the_repaired_ones() -> None:
    result, player = run(solve=wrong)
    assert accuracies(result) == (0.0, 1.0, 1.0, 1.0)
    assert flips(result) == (0, 10)
    judged, repaired = player.calls[3:]
    for source, judgement, reflection in zip(TASKS, judged, repaired, strict=True):
        own = wrong(source)
        assert judgement.prompt == f"Judge: {source.question} = {own} \\boxed{{}}"
        assert reflection.prompt == f"Fix: {source.question} = {own} \\boxed{{}}"
        assert (reflection.kind, reflection.answer, reflection.verifier) == ("reflect", source.answer, "math")


def test_a_distrustful_judge_spoils_right_answers() -> None:
    result, _ = run(judge_one=lambda _: "No", reflect=wrong)
    assert accuracies(result) == (1.0, 0.5, 1.0, 0.0)
    assert flips(result) == (10, 0)


def test_only_rejected_answers_are_repaired() -> None:
    def solve(task: Task) -> str:
        return gold(task) if int(task.id[1:]) < 3 else wrong(task)

    result, player = run(solve=solve, reflect=lambda task: gold(task) if task.source == "q9" else wrong(task))
    assert [task.source for task in player.calls[4]] == [f"q{i}" for i in range(3, 10)]
    assert result.solve == wilson(3, 10)
    assert result.reflect == wilson(4, 10)
    assert flips(result) == (0, 1)


def test_a_judgement_that_cannot_be_read_accepts_nothing() -> None:
    result, player = run(judge_one="no box")
    assert len(player.calls[4]) == 10
    assert result.counts["judge_one/unparsed"] == 10
    assert result.judge_one.acc == 0.0


def test_an_answer_that_cannot_be_read_is_neither_judged_nor_repaired() -> None:
    result, player = run(solve="no idea")
    assert [len(tasks) for tasks in player.calls] == [10, 10, 20, 0, 0]
    assert result.counts["solve/unparsed"] == 10
    assert (result.solve.acc, result.reflect.acc) == (0.0, 0.0)
    assert flips(result) == (0, 0)


def test_an_item_without_room_for_a_response_counts_as_cut_off() -> None:
    """It is wrong, not left out; what is asked about other items stays the same."""
    player = Player(solve=gold, judge_one=honest, judge_pair=honest_pair, reflect=gold)

    def sample(tasks: Sequence[Task]) -> list[Group]:
        groups = player(tasks)
        return [
            dataclasses.replace(group, rollouts=(), verdicts=()) if group.task.question == "3 + 3" else group
            for group in groups
        ]

    result = suite().run(sample)
    assert accuracies(result) == (0.9, 0.9, 0.9, 0.9)
    assert (result.solve.n, result.judge_pair.n) == (10, 10)
    assert {name: result.counts[f"{name}/truncated"] for name in ("solve", "judge_one", "judge_pair")} == {
        "solve": 1,
        "judge_one": 1,
        "judge_pair": 2,
    }
    assert [len(tasks) for tasks in player.calls] == [10, 10, 20, 9, 0]


def test_repairs_are_not_told_what_only_the_verifier_knows() -> None:
    """A judge that rejects everything: right and wrong answers get wordings of the same kind."""
    bank = load_bank("full")
    made = Suite.build(TASKS * 10, bank=bank, judge_verifier="choice", rounds=1)
    player = Player(
        solve=lambda task: gold(task) if int(task.id[1:]) % 2 else wrong(task),
        judge_one=lambda task: task.labels[1],
        judge_pair="\\boxed{A}",
        reflect=gold,
    )
    made.run(player)
    told = [t for t in bank.reflect.templates if t.told_wrong]
    openings = {t.text.partition("{question}")[0].partition("{shown}")[0] for t in told}
    asked = player.calls[4]
    assert len(asked) == 100
    assert not [task for task in asked if any(o and len(o) > 20 and task.prompt.startswith(o) for o in openings)]


def test_both_orders_of_a_pair_have_the_same_wording() -> None:
    made = Suite.build(TASKS, bank=load_bank("full"), judge_verifier="choice", rounds=1)
    for first, second in zip(made.judge_pair[::2], made.judge_pair[1::2], strict=True):
        assert sorted(first.prompt.split("\n")) == sorted(second.prompt.split("\n"))


def test_a_repair_that_cannot_be_read_loses_the_answer() -> None:
    result, player = run(rounds=2, judge_one=lambda _: "No", reflect="no box")
    assert result.reflect.acc == 0.0
    assert flips(result) == (10, 0)
    assert [len(tasks) for tasks in player.calls[3:]] == [10, 10, 0, 0]


def test_no_round_leaves_the_first_answers() -> None:
    result, player = run(rounds=0, solve=lambda task: gold(task) if task.id == "q0" else wrong(task))
    assert result.reflect == result.solve == wilson(1, 10)
    assert len(player.calls) == 3


def test_a_second_round_judges_the_repaired_answers() -> None:
    attempts: list[str] = []

    def second_time_right(task: Task) -> str:
        attempts.append(task.source)
        return gold(task) if attempts.count(task.source) == 2 else str(int(task.shown[0]) + 1)

    result, player = run(
        rounds=2,
        solve=lambda task: gold(task) if task.id in ("q0", "q1") else wrong(task),
        reflect=second_time_right,
    )
    assert result.reflect.acc == 1.0
    assert flips(result) == (0, 8)
    # Accepted answers are judged once; the last repair is not judged.
    assert [len(tasks) for tasks in player.calls[3:]] == [10, 8, 8, 8]
    assert [task.shown[0] for task in player.calls[5]] == [str(int(wrong(task)) + 1) for task in TASKS[2:]]


def test_forms_of_a_result() -> None:
    result, _ = run(tasks=TASKS[:4], judge_one=lambda _: "Yes")
    assert as_metrics(result) == {
        "eval/solve": 1.0,
        "eval/judge_one": 0.5,
        "eval/judge_pair": 1.0,
        "eval/reflect": 1.0,
        "eval_judging/judge_one/failure_rate": 0.0,
        "eval_judging/judge_one/yes_rate": 1.0,
        "eval_judging/judge_one/accuracy_right": 1.0,
        "eval_judging/judge_one/accuracy_wrong": 0.0,
        "eval_judging/judge_pair/failure_rate": 0.0,
        "eval_judging/judge_pair/a_rate": 0.5,
        "eval_judging/judge_pair/accuracy_first": 1.0,
        "eval_judging/judge_pair/accuracy_second": 1.0,
        "eval_judging/judge_pair/position_bias": 0.0,
        "eval_judging/judge_pair/swap_consistency": 1.0,
    }
    form = as_json(result)
    assert form["judge_one"] == {"acc": 0.5, "ci": wilson(2, 4).ci, "n": 4}
    assert set(form) == {field.name for field in dataclasses.fields(EvalResult)}
    assert Interval(**form["solve"]) == result.solve
