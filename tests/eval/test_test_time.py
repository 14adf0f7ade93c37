import math
from collections.abc import Callable, Sequence

import pytest

from spark_megatron.eval.test_time import Judge, Stage, at_tokens, best_of_n, equal_cost, flips, reflect, vote
from spark_megatron.recycle.templates import load_bank
from spark_megatron.rewards.math import MathVerifier
from spark_megatron.rewards.scoring import score_groups
from spark_megatron.rewards.verdict import ChoiceVerifier
from spark_megatron.types import Group, Rollout, Task

VERIFIERS = {
    "math": MathVerifier(symbolic=None),
    "choice": ChoiceVerifier(choices=[["Yes", "No"], ["A", "B"]]),
}
JUDGE = Judge(load_bank("concise"), "choice")
TASKS = [Task(f"q{i}", "solve", f"Solve: q{i}", "7", "math", f"q{i}") for i in range(4)]


def group(task: Task, *texts: str) -> Group:
    """Checked responses; one of r characters takes r tokens, one a character, with log-probs of 0."""
    rollouts = tuple(Rollout(tuple(map(ord, text)), (0.0,) * len(text), text, "stop", 0) for text in texts)
    return score_groups([Group(task, (1,), rollouts)], VERIFIERS)[0]


def boxed(answer: object) -> str:
    return f"\\boxed{{{answer}}}"


def model(answer: Callable[[Task], str]) -> tuple[Callable[[Sequence[Task]], list[Group]], list[Task]]:
    """A scripted model, and the tasks that it was asked."""
    asked: list[Task] = []

    def ask(tasks: Sequence[Task]) -> list[Group]:
        asked.extend(tasks)
        return [group(task, answer(task)) for task in tasks]

    return ask, asked


def test_reflection_by_hand() -> None:
    """Right and accepted; wrong, refused, mended; right, refused, spoiled, mended; unreadable, so left alone."""
    repairs = {("q1", "1"): "7", ("q2", "7"): "2", ("q2", "2"): "7"}
    verdicts = {("q0", "7"): "Yes", ("q1", "1"): "No", ("q1", "7"): "Yes", ("q2", "7"): "No", ("q2", "2"): "No"}

    def answer(task: Task) -> str:
        return boxed((verdicts if task.kind == "judge_one" else repairs)[task.source, task.shown[0]])

    ask, asked = model(answer)
    first = [group(task, text) for task, text in zip(TASKS, [boxed(7), boxed(1), boxed(7), "none"], strict=True)]
    stages = reflect(first, ask, JUDGE, rounds=2)
    assert [stage.rewards for stage in stages] == [(1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, 0)]
    assert [stage.accuracy.acc for stage in stages] == [0.5, 0.5, 0.75]
    kinds = [(task.kind, task.source) for task in asked]
    assert kinds == [
        *(("judge_one", q) for q in ("q0", "q1", "q2")), *(("reflect", q) for q in ("q1", "q2")),
        *(("judge_one", q) for q in ("q1", "q2")), ("reflect", "q2"),
    ]  # fmt: skip
    assert [stage.calls for stage in stages] == [4, 9, 12]
    one, yes, no = len(boxed(7)), len(boxed("Yes")), len(boxed("No"))
    assert [stage.tokens for stage in stages] == [
        3 * one + 4, 5 * one + 4 + yes + 2 * no, 6 * one + 4 + 2 * yes + 3 * no,
    ]  # fmt: skip
    assert flips(stages[0], stages[1]) == (1, 1)
    assert flips(stages[0], stages[2]) == (0, 1)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_a_model_that_never_accepts_is_asked_once_and_twice_per_round(rounds: int) -> None:
    ask, asked = model(lambda task: boxed("No") if task.kind == "judge_one" else boxed(1))
    stages = reflect([group(TASKS[0], boxed(7))], ask, JUDGE, rounds)
    assert stages[-1].calls == 1 + 2 * rounds == 1 + len(asked)
    assert [task.kind for task in asked] == ["judge_one", "reflect"] * rounds  # the last reflection is not judged


def test_an_unreadable_verdict_is_no_acceptance() -> None:
    ask, _ = model(lambda task: "perhaps" if task.kind == "judge_one" else boxed(7))
    assert reflect([group(TASKS[0], boxed(1))], ask, JUDGE, 1)[-1].rewards == (1.0,)


def test_votes_by_hand() -> None:
    answers = [
        group(TASKS[0], boxed(1), boxed(7), boxed("7.0")),  # equal by value: 7 wins with the third
        group(TASKS[1], boxed(7), boxed(1), boxed(2)),  # of equals the first
        group(TASKS[2], "none", boxed(7), "none"),  # what cannot be read has no vote
        group(TASKS[3], "none", "none", "none"),
    ]
    stages = vote(answers)
    assert [stage.rewards for stage in stages] == [(0, 1, 0, 0), (0, 1, 1, 0), (1, 1, 1, 0)]
    assert [stage.effort for stage in stages] == [1, 2, 3]
    assert [stage.calls for stage in stages] == [4, 8, 12]
    box = len(boxed(1))
    assert [stage.tokens for stage in stages] == [2 * box + 8, 5 * box + 12, 6 * box + len(boxed("7.0")) + 20]
    assert flips(stages[0], stages[2]) == (0, 2)


def test_best_of_n_by_the_hard_verdict() -> None:
    answers = [
        group(TASKS[0], boxed(1), boxed(7), boxed(1)),
        group(TASKS[1], boxed(1), boxed(7), boxed(2)),  # all refused: the first
        group(TASKS[2], "none", boxed(2), boxed(7)),  # 2 has an unreadable verdict
        group(TASKS[3], boxed(7), "none", boxed("7.0")),  # no choice: nothing is judged
    ]
    verdicts = {"q0": {"1": "No", "7": "Yes"}, "q1": {}, "q2": {"2": "?", "7": "No"}}
    ask, asked = model(lambda task: boxed(verdicts[task.source].get(task.shown[0], "No")))
    stages = best_of_n(answers, ask, JUDGE, decode=None)
    assert [stage.rewards for stage in stages] == [(0, 0, 0, 1), (1, 0, 0, 1), (1, 0, 1, 1)]
    assert [(task.source, task.shown[0]) for task in asked] == [
        ("q0", "1"), ("q0", "7"), ("q1", "1"), ("q1", "7"), ("q1", "2"), ("q2", "2"), ("q2", "7"),
    ]  # fmt: skip
    assert [stage.calls for stage in stages] == [4 + 0, 8 + 4, 12 + 7]
    box, no, yes, unread = len(boxed(1)), len(boxed("No")), len(boxed("Yes")), len(boxed("?"))
    assert stages[0].tokens == 3 * box + 4
    assert stages[2].tokens == 9 * box + len(boxed("7.0")) + 8 + 5 * no + yes + unread


def test_best_of_n_by_the_probability_of_the_verdict() -> None:
    """Accepted with 0.6 is less than accepted with 0.9, and refused with 0.7 less than either."""
    sure = {"1": ("Yes", 0.6), "7": ("Yes", 0.9), "2": ("No", 0.7)}

    def ask(tasks: Sequence[Task]) -> list[Group]:
        groups = []
        for task in tasks:
            verdict, p = sure[task.shown[0]]
            tokens = tuple(map(ord, boxed(verdict)))
            at = boxed(verdict).index(verdict)
            logprobs = tuple(math.log(p) if i == at else 0.0 for i in range(len(tokens)))
            groups.append(Group(task, (1,), (Rollout(tokens, logprobs, boxed(verdict), "stop", 0),)))
        return score_groups(groups, VERIFIERS)

    answers = [group(TASKS[0], boxed(2), boxed(1), boxed(7))]
    soft = best_of_n(answers, ask, JUDGE, decode=lambda tokens: "".join(map(chr, tokens)))
    hard = best_of_n(answers, ask, JUDGE, decode=None)
    assert [stage.rewards for stage in soft] == [(0,), (0,), (1,)]
    assert [stage.rewards for stage in hard] == [(0,), (0,), (0,)]  # of two accepted ones the first


def stage(effort: int, right: int, tokens: int) -> Stage:
    return Stage(effort, (1.0,) * right + (0.0,) * (10 - right), 10 * effort, tokens)


def test_accuracy_at_equal_tokens() -> None:
    stages = [stage(1, 4, 100), stage(2, 8, 200)]
    assert at_tokens(stages, 99) is None
    assert at_tokens(stages, 201) is None
    found = [at_tokens(stages, tokens) for tokens in (100, 150, 200)]
    assert [interval.acc for interval in found if interval] == [0.4, pytest.approx(0.6), 0.8]
    assert at_tokens(stages[:1], 100) == stages[0].accuracy


def test_methods_are_compared_at_what_all_can_spend() -> None:
    methods = {"a": [stage(1, 4, 100), stage(2, 8, 200)], "b": [stage(1, 5, 160)], "c": [stage(1, 9, 170)]}
    budget, found = equal_cost(methods)
    assert budget == 160
    assert found["a"] is not None
    assert found["b"] is not None
    assert (found["a"].acc, found["b"].acc, found["c"]) == (pytest.approx(0.64), 0.5, None)
