"""Finding the best and the worst rollouts."""

from typing import Any

from spark_megatron.report.examples import find_examples


def group(step: int, *rewards: float | None, kind: str = "solve") -> dict[str, Any]:
    rollouts = [
        {"text": f"{step}.{i}", "reward": r, "status": "ok", "parsed": None, "length": 1} for i, r in enumerate(rewards)
    ]
    return {"step": step, "kind": kind, "prompt": "p", "answer": "a", "rollouts": rollouts}


def test_the_extremes_of_different_groups_the_latest_first() -> None:
    rows = [group(1, 1.0, 0.5), group(2, 0.2, 1.0, 1.0), group(3, 0.4, 0.3), group(4, 1.0, 0.2)]
    found = find_examples(rows, per_end=2)["solve"]
    assert [e.text for e in found.best] == ["4.0", "2.1"]
    assert [e.text for e in found.worst] == ["4.1", "2.0"]


def test_kinds_are_apart() -> None:
    found = find_examples([group(1, 1.0, 0.0), group(1, 0.3, 0.6, kind="reflect")], per_end=1)
    assert [e.reward for e in found["reflect"].best + found["reflect"].worst] == [0.6, 0.3]
    assert [e.reward for e in found["solve"].best + found["solve"].worst] == [1.0, 0.0]


def test_nothing_is_both_best_and_worst() -> None:
    found = find_examples([group(1, 1.0)], per_end=2)["solve"]
    assert ([e.text for e in found.best], found.worst) == (["1.0"], [])


def test_empty_groups_and_null_rewards() -> None:
    assert find_examples([group(1)]) == {}
    assert find_examples([group(1, None)])["solve"].best[0].reward == 0.0
