"""The Wilson interval against published values and its own definition."""

import math

import pytest

from spark_megatron.tracking.intervals import Z_95, difference, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_published_values(successes: int, n: int, low: float, high: float) -> None:
    interval = wilson(successes, n)
    assert interval.ci == pytest.approx((low, high), abs=5e-5)
    assert interval.acc == successes / n
    assert interval.n == n


@pytest.mark.parametrize(("successes", "n"), [(3, 10), (57, 64), (512, 1000)])
def test_bounds_solve_the_score_equation(successes: int, n: int) -> None:
    """At either bound the observed rate lies exactly z standard errors (of the bound) away."""
    p = successes / n
    for bound in wilson(successes, n).ci:
        assert abs(p - bound) / math.sqrt(bound * (1 - bound) / n) == pytest.approx(Z_95)


def test_ends_are_exact_and_symmetric() -> None:
    none, all_ = wilson(0, 12), wilson(12, 12)
    assert none.ci[0] == 0.0
    assert all_.ci[1] == 1.0
    assert none.ci[1] == pytest.approx(1 - all_.ci[0])
    assert 0 < none.ci[1] < 1


def test_nothing_tested_is_nothing_known() -> None:
    interval = wilson(0, 0)
    assert math.isnan(interval.acc)
    assert interval.ci == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(-1, 5), (6, 5), (0, -1)])
def test_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="must lie between 0 and n"):
        wilson(successes, n)


def test_difference_of_published_values() -> None:
    """Newcombe (1998), Statistics in Medicine 17:873, table II: 56/70 against 48/80, method 10."""
    change, (low, high) = difference(before=wilson(48, 80), after=wilson(56, 70))
    assert change == pytest.approx(0.2)
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_difference_turns_round_with_its_arguments() -> None:
    one, other = wilson(3, 10), wilson(20, 25)
    change, (low, high) = difference(one, other)
    assert difference(other, one) == (pytest.approx(-change), (pytest.approx(-high), pytest.approx(-low)))
