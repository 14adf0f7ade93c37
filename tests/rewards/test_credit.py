import pytest

from spark_megatron.rewards.credit import PassedShare, RareTests

PASSED = [[True, True, True], [True, True, False], [True, False, False], [True, False, False]]


def test_share() -> None:
    assert PassedShare()(PASSED) == [1.0, 2 / 3, 1 / 3, 1 / 3]


def test_rare_tests_count_more() -> None:
    # Pass rates 1, 1/2, 1/4; weights 0, 0.4, 0.6; dense 1, 0.4, 0, 0.
    assert RareTests(outcome_share=0.5)(PASSED) == pytest.approx([1.0, 0.2, 0.0, 0.0])
    assert RareTests(outcome_share=0.0)(PASSED) == pytest.approx([1.0, 0.4, 0.0, 0.0])
    assert RareTests(outcome_share=1.0)(PASSED) == [1.0, 0.0, 0.0, 0.0]


def test_rare_tests_tell_failures_apart() -> None:
    failing = [[True, True, False], [True, False, False], [True, False, False], [True, False, False]]
    assert RareTests(outcome_share=0.0)(failing) == pytest.approx([0.428571, 0.0, 0.0, 0.0], abs=1e-6)


def test_rare_tests_at_the_ends() -> None:
    assert RareTests(outcome_share=0.5)([[True, True]] * 3) == [1.0] * 3
    assert RareTests(outcome_share=0.5)([[False, False]] * 3) == [0.0] * 3
    assert RareTests(outcome_share=0.5)([[True, False]]) == [0.0]
    with pytest.raises(ValueError, match=r"outcome_share=1\.5"):
        RareTests(outcome_share=1.5)
