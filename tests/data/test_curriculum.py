from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from spark_megatron.data.curriculum import Gaussian, Resample, Shuffled
from spark_megatron.types import Task


def tasks(n: int) -> list[Task]:
    return [Task(str(i), "solve", f"{i}?", str(i), "math", f"{i}?") for i in range(n)]


def gaussian(**changes: float) -> Gaussian:
    return Gaussian(**{"target": 0.5, "width": 0.2, "explore": 0.0, "rate": 0.5, **changes})


def test_shuffled_keeps_the_order_of_the_pass() -> None:
    given = tasks(5)
    assert Shuffled().choose(given, 2, 3, random.Random(0)) == given[2:]


def test_gaussian_probabilities() -> None:
    order = gaussian()
    order.observe({"0": 0.0, "1": 0.25, "2": 0.5, "3": 1.0})
    # exp(-3.125), exp(-0.78125), 1, exp(-3.125), over their sum.
    assert order.probabilities(tasks(4)) == pytest.approx([0.028425, 0.296197, 0.646953, 0.028425], abs=1e-6)
    order.explore = 0.1
    assert order.probabilities(tasks(4)) == pytest.approx([0.050583, 0.291577, 0.607258, 0.050583], abs=1e-6)


def test_untried_tasks_are_taken_for_the_right_ones() -> None:
    order = gaussian()
    order.observe({"0": 0.0})
    first, second, third = order.probabilities(tasks(3))
    assert second == third > 10 * first


def test_weights_far_from_the_target_do_not_vanish_together() -> None:
    order = gaussian(width=0.001)
    order.observe({"0": 0.0, "1": 0.0, "2": 0.1})
    assert order.probabilities(tasks(3)) == pytest.approx([0.0, 0.0, 1.0])
    order.observe({"2": -0.1})
    assert order.probabilities(tasks(2)) == pytest.approx([0.5, 0.5])
    assert len({task.id for task in order.choose(tasks(3), 0, 3, random.Random(0))}) == 3


def test_draws_follow_the_probabilities_and_are_distinct() -> None:
    order = gaussian(explore=0.1)
    order.observe({"0": 0.0, "1": 0.25, "2": 0.5, "3": 1.0})
    rng = random.Random(0)
    drawn = Counter(order.choose(tasks(4), 0, 1, rng)[0].id for _ in range(20_000))
    for index, probability in enumerate(order.probabilities(tasks(4))):
        assert drawn[str(index)] / 20_000 == pytest.approx(probability, abs=0.012)
    assert len({task.id for task in order.choose(tasks(50), 30, 20, rng)}) == 20


def test_past_accuracy_is_a_moving_mean_that_survives() -> None:
    order = gaussian(rate=0.25)
    order.observe({"0": 1.0})
    order.observe({"0": 0.0, "1": 0.5})
    assert order.rates == {"0": 0.75, "1": 0.5}
    other = gaussian(rate=0.25)
    other.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert other.rates == order.rates
    other.load_state_dict({})
    assert other.rates == {}


@pytest.mark.parametrize(("name", "value"), [("target", 1.5), ("width", 0.0), ("explore", -0.1), ("rate", 0.0)])
def test_settings_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        gaussian(**{name: value})


def test_resampling_stays_within_its_budget() -> None:
    resample = Resample(budget=10)
    assert [resample.more(flat, spent) for flat, spent in ((0, 0), (4, 0), (8, 4), (8, 10), (3, 12))] == [0, 4, 6, 0, 0]
    with pytest.raises(ValueError, match="budget=0"):
        Resample(budget=0)
