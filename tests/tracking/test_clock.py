"""The clock, with a hand that the test moves."""

import subprocess
import sys

import pytest

from spark_megatron.tracking.clock import Clock, peak_rss_gb


class Hand:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def hand() -> Hand:
    return Hand()


def test_phases_add_up_to_the_step_and_the_rest_is_other(hand: Hand) -> None:
    clock = Clock(now=hand)
    hand.seconds += 50  # before the step
    clock.begin()
    for _ in range(2):
        with clock("rollout"):
            hand.seconds += 3
    hand.seconds += 0.5
    with clock("update"):
        hand.seconds += 2
    assert clock.end() == {"time/rollout": 6, "time/update": 2, "time/other": 0.5, "time/step": 8.5}


def test_nested_phases_are_not_counted_twice(hand: Hand) -> None:
    clock = Clock(now=hand)
    clock.begin()
    with clock("rollout"):
        hand.seconds += 1
        with clock("handoff"):
            hand.seconds += 4
            with clock("rollout"):
                hand.seconds += 8
        hand.seconds += 16
    assert clock.end() == {"time/rollout": 25, "time/handoff": 4, "time/other": 0, "time/step": 29}


def test_a_phase_named_other_joins_the_rest(hand: Hand) -> None:
    clock = Clock(now=hand)
    clock.begin()
    with clock("other"):
        hand.seconds += 2
    hand.seconds += 1
    assert clock.end() == {"time/other": 3, "time/step": 3}


def test_a_phase_that_raises_is_counted_and_closed(hand: Hand) -> None:
    clock = Clock(now=hand)
    clock.begin()
    with pytest.raises(KeyError), clock("score"):
        hand.seconds += 2
        raise KeyError
    hand.seconds += 1
    assert clock.end() == {"time/score": 2, "time/other": 1, "time/step": 3}


def test_a_step_forgets_the_last_one(hand: Hand) -> None:
    clock = Clock(now=hand)
    for _ in range(2):
        clock.begin()
        with clock("eval"):
            hand.seconds += 5
        assert clock.end()["time/eval"] == 5


def test_eta_is_the_mean_without_the_first_step(hand: Hand) -> None:
    clock = Clock(now=hand)
    etas = []
    for step, length in enumerate((60, 2, 4), start=1):
        clock.begin()
        hand.seconds += length
        clock.end()
        etas.append(clock.eta(step, total=10))
    assert etas == [None, 8 * 2, 7 * 3]
    assert clock.eta(12, total=10) == 0


def test_peak_memory_counts_what_was_touched_and_let_go() -> None:
    code = (
        "from spark_megatron.tracking.clock import peak_rss_gb\n"
        "block = bytearray(b'x') * 300_000_000\n"
        "del block\n"
        "print(peak_rss_gb())\n"
    )
    child = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    # Linux hands a parent's peak on to what it starts, so only this bound is certain from above.
    assert 0.3 < child < 0.4 + peak_rss_gb()
    assert peak_rss_gb() >= child  # the ended child is part of this process' figure
