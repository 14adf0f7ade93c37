"""What n checked answers to one question say about k of them: pass@k, mean@k and maj@k, and their means over questions.

Each estimate is the exact mean over all choices of k of the n answers, so that none of them is wasted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from spark_megatron.tracking.intervals import wilson
from spark_megatron.types import Interval


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that at least one of k answers, drawn from n of which ``right`` are right, is right.

    The unbiased estimator of Chen et al. (arXiv 2107.03374, eq. 1): 1 - C(n - right, k) / C(n, k).
    Raises ValueError unless 0 <= right <= n and 1 <= k <= n.
    """
    if not (0 <= right <= n and 1 <= k <= n):
        raise ValueError(f"pass@k: n={n}, right={right}, k={k}: needs 0 <= right <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[int | None], rewards: Sequence[float], k: int) -> float:
    """The expected reward of the most frequent answer among k of the n, an even draw deciding between equals (ours).

    That is the mean over all k answers in all orders where the earlier of equals wins, too. ``answers`` has a number
    for each answer, the same for equal ones, and None for an answer that could not be read, which does not vote; k
    unread ones earn 0. Equal answers earn their mean reward. Raises ValueError unless 1 <= k <= n.
    """
    n = len(answers)
    if len(rewards) != n or not 1 <= k <= n:
        raise ValueError(f"maj@k: {n} answers, {len(rewards)} rewards, k={k}: needs as many of both and 1 <= k <= n")
    sizes = Counter(answers)
    silent = sizes.pop(None, 0)
    earned: dict[int | None, float] = dict.fromkeys(sizes, 0.0)
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            earned[answer] += reward / sizes[answer]
    total = 0.0
    for winner, size in sizes.items():
        others = [count for answer, count in sizes.items() if answer != winner]
        for votes in range(1, min(size, k) + 1):
            ways = math.comb(size, votes) * _shares(others, silent, votes, k - votes)
            total += earned[winner] * ways
    return total / math.comb(n, k)


def _shares(others: Sequence[int], silent: int, votes: int, rest: int) -> float:
    """Over the ways to draw ``rest`` answers with at most ``votes`` of each kind: the sum of 1 / (1 + kinds that tie).

    ``others`` are the sizes of the kinds; of the ``silent`` ones any number may be drawn.
    """
    ways: Counter[tuple[int, int]] = Counter({(drawn, 0): math.comb(silent, drawn) for drawn in range(rest + 1)})
    for size in others:
        grown: Counter[tuple[int, int]] = Counter()
        for (drawn, ties), count in ways.items():
            for more in range(min(size, votes, rest - drawn) + 1):
                grown[drawn + more, ties + (more == votes)] += count * math.comb(size, more)
        ways = grown
    return sum(count / (1 + ties) for (drawn, ties), count in ways.items() if drawn == rest)


def at_k(
    answers: Sequence[Sequence[int | None]], rewards: Sequence[Sequence[float]], ks: Sequence[int]
) -> Mapping[str, Interval]:
    """ "pass@k" and "maj@k" for each k, and "mean@n" with the largest n, over questions with their checked answers.

    The 95 % intervals are Wilson's over questions, whose answers are no independent observations. An answer is right
    with a reward of 1. A question with fewer than k answers counts with as many as it has.
    """
    questions = len(rewards)
    passed = {k: sum(pass_at_k(len(r), sum(x == 1.0 for x in r), min(k, len(r))) for r in rewards) for k in ks}
    pairs = list(zip(answers, rewards, strict=True))
    voted = {k: sum(maj_at_k(a, r, min(k, len(r))) for a, r in pairs) for k in ks}
    mean = sum(sum(r) / len(r) for r in rewards)
    return {
        f"mean@{max(map(len, rewards), default=0)}": wilson(mean, questions),
        **{f"pass@{k}": wilson(passed[k], questions) for k in ks},
        **{f"maj@{k}": wilson(min(voted[k], questions), questions) for k in ks},
    }
