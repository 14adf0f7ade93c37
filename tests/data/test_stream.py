"""Positions, held-out sources, lengths and orders of the stream of tasks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from spark_megatron.data.curriculum import Gaussian, Shuffled
from spark_megatron.data.sources import solve_task
from spark_megatron.data.stream import TaskStream
from spark_megatron.types import Task


class Numbers:
    """Questions about numbers, shuffled by the key as a file's are."""

    def __init__(self, first: int, last: int) -> None:
        self._range = range(first, last)

    @property
    def fingerprint(self) -> str:
        return str(self._range)

    def tasks(self, key: str) -> list[Task]:
        made = [solve_task(f"What is {i}?", str(i), instruction=None, verifier="math") for i in self._range]
        return random.Random(key).sample(made, len(made))


def stream(source: Numbers | None = None, **settings: Any) -> TaskStream:
    defaults: dict[str, Any] = {"seed": 0, "heldout_share": 0.0, "order": Shuffled()}
    return TaskStream(source=source or Numbers(0, 60), **{**defaults, **settings})


def gaussian() -> Gaussian:
    return Gaussian(target=0.5, width=0.2, explore=0.1, rate=0.5)


def answers(tasks: list[Task]) -> list[int]:
    return [int(task.answer) for task in tasks]


def saved(made: TaskStream) -> Any:
    return json.loads(json.dumps(made.state_dict()))


@pytest.mark.parametrize("order", [Shuffled, gaussian])
@pytest.mark.parametrize("steps", [0, 1, 5, 6, 7, 12, 13])
def test_a_resumed_stream_is_the_uninterrupted_one(order: Any, steps: int) -> None:
    """Six steps are one pass: in the middle of one, at its very end, and in the next."""
    whole = stream(order=order())
    taken = []
    for step in range(24):
        tasks = whole.take(10)
        taken.append(answers(tasks))
        whole.observe({task.id: (step % 5) / 4 for task in tasks})
    first = stream(order=order())
    for step in range(steps):
        tasks = first.take(10)
        first.observe({task.id: (step % 5) / 4 for task in tasks})
    resumed = stream(order=order())
    resumed.take(3)  # reading ahead before the state is loaded changes nothing
    resumed.load_state_dict(saved(first))
    rest = []
    for step in range(steps, 24):
        tasks = resumed.take(10)
        rest.append(answers(tasks))
        resumed.observe({task.id: (step % 5) / 4 for task in tasks})
    assert taken[steps:] == rest


def test_a_pass_ends_where_the_tasks_do() -> None:
    made = stream()
    first = answers(made.take(60))
    assert made.metrics()["data/epoch"] == 1.0
    state = saved(made)
    second = answers(made.take(60))
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second
    resumed = stream()
    resumed.load_state_dict(state)
    assert answers(resumed.take(60)) == second  # all of it, not nothing
    assert answers(stream().take(130))[60:120] == second


def test_another_source_starts_anew_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = stream(order=gaussian())
    made.observe({task.id: 0.0 for task in made.take(30)})
    for changed in (stream(Numbers(0, 61)), stream(seed=1), stream(heldout_source=Numbers(100, 103))):
        caplog.clear()
        expected = stream(Numbers(0, 61)) if len(changed._tasks) == 61 else changed
        fresh = answers(expected.take(20))
        changed.load_state_dict(saved(made))
        assert "the stream starts anew" in caplog.text
        assert answers(changed.take(20)) == fresh


def test_a_state_of_an_older_version_can_be_gone_on_with() -> None:
    made = stream()
    made.take(70)
    old = {key: value for key, value in saved(made).items() if key not in ("order", "overlong")}
    resumed = stream()
    resumed.load_state_dict(old)
    assert answers(resumed.take(10)) == answers(made.take(10))


def test_heldout_tasks_from_a_source_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    made = stream(heldout_source=Numbers(50, 80))
    held = answers(made.heldout(30))
    assert sorted(held) == list(range(50, 80))
    assert held[:7] == answers(stream(seed=9, heldout_source=Numbers(50, 80)).heldout(7))
    assert sorted(answers(made.take(50))) == list(range(50))
    assert "10 of 60 training tasks ask held-out questions and are left out: 'What is 5" in caplog.text
    with pytest.raises(ValueError, match=r"31 held-out tasks asked, but data\.heldout has 30"):
        made.heldout(31)
    with pytest.raises(ValueError, match=r"data\.heldout leaves none of the 60 tasks"):
        stream(heldout_source=Numbers(0, 60))


def test_no_overlap_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    stream(heldout_source=Numbers(60, 80))
    assert caplog.text == ""


def test_too_long_prompts_are_left_out_in_order_and_counted() -> None:
    def limit(task: Task) -> Task | None:
        number = int(task.answer)
        return None if number % 3 == 0 else replace(task, prompt="cut") if number % 3 == 1 else task

    made = stream(limit=limit)
    kept = made.take(40)
    assert answers(kept) == [number for number in answers(stream().take(60)) if number % 3]
    assert {task.prompt for task in kept if int(task.answer) % 3 == 1} == {"cut"}
    resumed = stream(limit=limit)
    resumed.load_state_dict(saved(made))
    assert answers(resumed.take(20)) == answers(made.take(20))
    assert resumed.metrics() == made.metrics()
    counts = made.metrics()
    assert counts["data/overlong_cut"] + counts["data/overlong_dropped"] > 40
    assert counts["data/overlong_dropped"] >= 20


def test_prompts_that_are_all_too_long_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"too long: raise data\.max_prompt_tokens"):
        stream(limit=lambda task: None).take(1)


def test_a_curriculum_prefers_what_is_solved_half_of_the_time() -> None:
    made = stream(Numbers(0, 100), order=Gaussian(target=0.5, width=0.2, explore=0.0, rate=1.0))
    made.observe({task.id: (0.5 if int(task.answer) < 20 else 1.0) for task in Numbers(0, 100).tasks("")})
    drawn = [number for _ in range(50) for number in answers(made.take(10))]
    # 20 tasks of weight 1 and 80 of weight exp(-3.125) = 0.044: 85 % of single draws; fewer of ten at once.
    assert 0.7 < sum(number < 20 for number in drawn) / len(drawn) < 0.88
