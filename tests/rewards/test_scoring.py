from dataclasses import replace

import pytest

from spark_megatron.rewards.math import MathVerifier
from spark_megatron.rewards.protocol import Verifier
from spark_megatron.rewards.scoring import score_groups, status_counts, training_rewards
from spark_megatron.rewards.verdict import ChoiceVerifier
from spark_megatron.types import Group, Rollout, Status, Task, Verdict

VERIFIERS: dict[str, Verifier] = {
    "math": MathVerifier(symbolic=None),
    "choice": ChoiceVerifier(choices=[["Yes", "No"]]),
}
TABLE: dict[Status, float | None] = {"unparsed": 0.0, "truncated": -0.5, "timeout": None, "error": None}


def group(verifier: str, answer: str, *texts: str, finish: str = "stop") -> Group:
    task = Task("t1", "solve", "prompt", answer, verifier, "question")
    rollouts = tuple(Rollout((1,), (-0.5,), text, finish, 0) for text in texts)  # type: ignore[arg-type]
    return Group(task, (5, 6), rollouts)


def test_each_group_is_checked_by_the_verifier_it_names() -> None:
    solve, judge = group("math", "8", r"\boxed{8}", r"\boxed{9}", "eight"), group("choice", "No", r"\boxed{no}")
    scored = score_groups([solve, judge], VERIFIERS)
    assert scored[0].verdicts == (Verdict("ok", 1.0, "8"), Verdict("ok", 0.0, "9"), Verdict("unparsed"))
    assert scored[1].verdicts == (Verdict("ok", 1.0, "No"),)
    assert replace(scored[0], verdicts=()) == solve
    assert solve.verdicts == ()


def test_unknown_verifier_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown verifier 'maths'.*'math'"):
        score_groups([group("maths", "8", "x")], VERIFIERS)


def test_failing_verifier_is_raised_with_the_task() -> None:
    def failing(task: Task, response: str, finish: str) -> Verdict:
        raise KeyError("lost")

    with pytest.raises(RuntimeError, match=r"'bad' failed on task t1.*lost") as caught:
        score_groups([group("bad", "8", "x")], {"bad": failing})
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("verdict", [Verdict("ok", float("nan")), Verdict("ok", 1.5), Verdict("unparsed", 1.0)])
def test_rewards_outside_their_range_are_refused(verdict: Verdict) -> None:
    with pytest.raises(ValueError, match=r"t1: not in \[0, 1\]"):
        score_groups([group("odd", "8", "x")], {"odd": lambda task, response, finish: verdict})


def test_training_rewards_follow_the_table() -> None:
    verdicts = (
        Verdict("ok", 0.25, "x"),
        Verdict("ok", 0.0, "x"),
        Verdict("unparsed"),
        Verdict("truncated"),
        Verdict("timeout"),
        Verdict("error"),
    )
    checked = replace(group("math", "8", *"abcdef"), verdicts=verdicts)
    assert training_rewards(checked, TABLE) == (0.25, 0.0, 0.0, -0.5, None, None)
    assert training_rewards(checked, {**TABLE, "unparsed": None}) == (0.25, 0.0, None, -0.5, None, None)


def test_a_table_must_name_every_status_but_ok() -> None:
    checked = replace(group("math", "8", "a"), verdicts=(Verdict("ok", 1.0),))
    with pytest.raises(ValueError, match=r"missing=.'error'"):
        training_rewards(checked, {name: value for name, value in TABLE.items() if name != "error"})
    with pytest.raises(ValueError, match="every status but 'ok'"):
        training_rewards(checked, {**TABLE, "ok": 1.0})


def test_unchecked_group_has_no_training_rewards() -> None:
    with pytest.raises(ValueError, match="2 rollouts but 0 verdicts"):
        training_rewards(group("math", "8", "a", "b"), TABLE)


def test_status_counts_have_every_status() -> None:
    checked = score_groups([group("math", "8", "a", r"\boxed{8}"), group("math", "8", "a", finish="length")], VERIFIERS)
    assert status_counts(checked) == {"ok": 1, "unparsed": 1, "truncated": 1, "timeout": 0, "error": 0}
    assert sum(status_counts([]).values()) == 0
