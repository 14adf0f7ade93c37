import itertools
import math
import random

import pytest

from spark_megatron.eval.at_k import at_k, maj_at_k, pass_at_k


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs hold the right one
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(4, 3, 2) == 1.0  # one wrong answer makes no pair
    assert pass_at_k(200, 0, 100) == 0.0


@pytest.mark.parametrize(("n", "right", "k"), [(0, 0, 1), (4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, right={right}, k={k}"):
        pass_at_k(n, right, k)


def first_of_the_most_frequent(answers: tuple[int | None, ...]) -> int | None:
    votes = [answer for answer in answers if answer is not None]
    return max(votes, key=votes.count, default=None)


def test_both_estimators_are_the_means_over_all_draws() -> None:
    rng = random.Random(0)
    for _ in range(60):
        n = rng.randint(1, 6)
        answers = [rng.choice([None, 0, 1, 2]) for _ in range(n)]
        right = rng.randint(0, 2)
        rewards = [float(answer == right) for answer in answers]
        for k in range(1, n + 1):
            draws = list(itertools.permutations(range(n), k))
            passed = sum(any(rewards[i] for i in draw) for draw in draws) / len(draws)
            assert pass_at_k(n, int(sum(rewards)), k) == pytest.approx(passed)
            won = sum(first_of_the_most_frequent(tuple(answers[i] for i in draw)) == right for draw in draws)
            assert maj_at_k(answers, rewards, k) == pytest.approx(won / len(draws))


def test_a_majority_by_hand() -> None:
    assert maj_at_k([0, 0, 1], [1.0, 1.0, 0.0], 3) == 1.0
    assert maj_at_k([0, 1], [1.0, 0.0], 2) == 0.5  # an even draw
    assert maj_at_k([0, None, None], [1.0, 0.0, 0.0], 3) == 1.0  # what cannot be read has no vote
    assert maj_at_k([None, None], [0.0, 0.0], 2) == 0.0
    with pytest.raises(ValueError, match="k=3"):
        maj_at_k([0, 1], [1.0, 0.0], 3)


def test_large_numbers_of_answers_take_no_time() -> None:
    answers = [i % 9 for i in range(64)]
    assert 0.0 < maj_at_k(answers, [float(a == 0) for a in answers], 32) < 1.0


def test_means_over_questions() -> None:
    answers = [[0, 0, 1, 2], [0, 1, 1, 1], [None] * 4]
    rewards = [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4]
    found = at_k(answers, rewards, (1, 2, 4))
    assert list(found) == ["mean@4", "pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"]
    assert found["mean@4"].acc == found["pass@1"].acc == found["maj@1"].acc == pytest.approx(0.75 / 3)
    assert found["pass@2"].acc == pytest.approx((5 / 6 + 1 / 2) / 3)
    assert found["pass@4"].acc == pytest.approx(2 / 3)
    assert found["maj@4"].acc == pytest.approx(1 / 3)
    assert all(value.n == 3 and value.ci[0] < value.acc < value.ci[1] for value in found.values())


def test_a_question_with_fewer_answers_counts_with_those() -> None:
    found = at_k([[0, 1], [None]], [[1.0, 0.0], [0.0]], (2,))
    assert (found["pass@2"].acc, found["maj@2"].acc, found["mean@2"].acc) == (0.5, 0.25, 0.25)


def test_no_question_is_nothing_known() -> None:
    assert math.isnan(at_k([], [], (1,))["pass@1"].acc)
