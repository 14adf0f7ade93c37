import json
from dataclasses import replace

import pytest

from spark_megatron.recycle.pool import Pool
from spark_megatron.types import Task


def task(number: int) -> Task:
    return Task(f"t{number}", "judge_pair", f"p{number}", "A", "choice", "q", "q1", ("8", "9"), ("A", "B"))


def tasks(*numbers: int) -> list[Task]:
    return [task(number) for number in numbers]


def test_first_in_first_out() -> None:
    pool = Pool(max_size=None)
    pool.add(tasks(1, 2, 3))
    assert pool.take(2) == tasks(1, 2)
    pool.add(tasks(4))
    assert len(pool) == 2
    assert pool.take(2) == tasks(3, 4)
    assert len(pool) == 0
    assert pool.take(0) == []


def test_the_oldest_are_dropped_beyond_the_limit() -> None:
    pool = Pool(max_size=3)
    pool.add(tasks(1, 2))
    pool.add(tasks(3, 4, 5))
    assert pool.take(3) == tasks(3, 4, 5)


def test_asking_for_too_many_is_refused_and_takes_none() -> None:
    pool = Pool(max_size=None)
    pool.add(tasks(1))
    with pytest.raises(ValueError, match="2 tasks asked of a pool of 1"):
        pool.take(2)
    assert len(pool) == 1


def test_state_survives_json() -> None:
    pool, other = Pool(max_size=None), Pool(max_size=None)
    pool.add(tasks(1, 2, 3))
    pool.take(1)
    other.add(tasks(9))
    other.load_state_dict(json.loads(json.dumps(pool.state_dict())))
    assert other.take(2) == tasks(2, 3)
    assert len(other) == 0


def test_a_state_from_before_tasks_had_labels() -> None:
    pool, other = Pool(max_size=None), Pool(max_size=None)
    pool.add(tasks(1))
    state = pool.state_dict()
    del state["tasks"][0]["labels"]
    other.load_state_dict(state)
    assert other.take(1) == [replace(task(1), labels=())]


def test_a_smaller_pool_keeps_the_newest_of_a_state() -> None:
    pool, small = Pool(max_size=None), Pool(max_size=2)
    pool.add(tasks(1, 2, 3))
    small.load_state_dict(pool.state_dict())
    assert small.take(2) == tasks(2, 3)


def test_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_size=0"):
        Pool(max_size=0)
