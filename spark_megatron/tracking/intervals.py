"""Confidence intervals of proportions."""

from __future__ import annotations

import math

from spark_megatron.types import Interval

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""


def wilson(successes: float, n: int) -> Interval:
    """The Wilson score interval, 95 %, of ``successes`` out of ``n`` (Wilson 1927, eq. for the score test inverted).

    Unlike the normal approximation it stays within [0, 1] and has a width above 0 at 0 % and at 100 %. Fractional
    successes are allowed (a mean of rewards in [0, 1]); the interval is then conservative. Nothing tested (``n`` = 0)
    is nothing known: accuracy NaN, interval (0, 1).

    Raises ValueError where ``successes`` does not lie in [0, n].
    """
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"wilson: successes={successes} must lie between 0 and n={n}; pass a count, not a rate")
    if n == 0:
        return Interval(acc=math.nan, ci=(0.0, 1.0), n=0)
    p, shrink = successes / n, 1 + Z_95**2 / n
    centre = (p + Z_95**2 / (2 * n)) / shrink
    half = Z_95 / shrink * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(acc=p, ci=(low, high), n=n)


def difference(before: Interval, after: Interval) -> tuple[float, tuple[float, float]]:
    """``after - before`` of two proportions with its 95 % interval (Newcombe 1998, Stat. Med. 17:873, method 10).

    Squares and adds the distances to the Wilson bounds. Takes the two as independent samples: for answers to the same
    questions it is therefore somewhat too wide.
    """
    change = after.acc - before.acc
    down = math.hypot(after.acc - after.ci[0], before.ci[1] - before.acc)
    up = math.hypot(after.ci[1] - after.acc, before.acc - before.ci[0])
    return change, (change - down, change + up)
