"""How a step's judges judged: sums first, which add up over groups, steps and ranks, and figures last.

A judge task asks about an event: "the shown answer is right" (``judge_one``) or "the first answer is the right one"
(``judge_pair``). A verdict says that the event holds, that it does not, or cannot be read.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

from spark_megatron.rewards.verdict import label_span
from spark_megatron.types import Group, Metrics, Rollout, TaskKind

Decode = Callable[[Sequence[int]], str]
"""From tokens to text, as the sampler made the texts of its rollouts."""

BINS = 10
"""Of equal width over [0, 1], for the calibration error; the last one holds 1.0 too."""

_KINDS: Mapping[TaskKind, tuple[str, str, str]] = {
    "judge_one": ("yes_rate", "right", "wrong"),
    "judge_pair": ("a_rate", "first", "second"),
}
"""What the share of verdicts that say "it holds" is called, and the tasks where that is true and where it is not."""


def judge_sums(groups: Iterable[Group], decode: Decode | None) -> dict[str, float]:
    """Sums over the judge rollouts of checked groups, under the same names whatever was asked.

    ``decode`` serves to find the token of a verdict; without it (None) nothing is known about calibration. Tasks
    without labels are left out.
    """
    groups = [group for group in groups if group.task.kind in _KINDS and group.task.labels and group.verdicts]
    sums = dict.fromkeys(_names(), 0.0)
    for group in groups:
        kind, holds = group.task.kind, group.task.answer == group.task.labels[0]
        truth = "true" if holds else "false"
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            sums[f"{kind}/asked/{truth}"] += 1
            sums[f"{kind}/read/{truth}"] += verdict.status == "ok"
            sums[f"{kind}/correct/{truth}"] += verdict.status == "ok" and verdict.reward == 1.0
            said = verdict.parsed if verdict.status == "ok" else None
            sure = verdict_probability(rollout, said, decode) if said and decode else None
            if sure is not None:
                p = sure if said == group.task.labels[0] else 1.0 - sure
                cell = f"{kind}/bin{min(int(p * BINS), BINS - 1)}"
                sums[f"{cell}/count"] += 1
                sums[f"{cell}/p"] += p
                sums[f"{cell}/true"] += holds
                sums[f"{kind}/squares"] += (p - holds) ** 2
    pairs, agreeing = swaps(groups)
    return sums | {"judge_pair/swaps": pairs, "judge_pair/agreeing": agreeing}


def judge_figures(sums: Mapping[str, float]) -> Metrics:
    """Named figures from (added up) ``judge_sums``; what has no case has no figure.

    Per kind: ``failure_rate``, the share of responses without a readable verdict; ``yes_rate`` (``a_rate``), of the
    readable ones those that say "right" ("the first"); ``accuracy_right`` and ``accuracy_wrong`` (``_first``,
    ``_second``), by what is true, an unreadable verdict being a wrong one; ``brier``, the mean of (p - y)^2 with p the
    probability of the verdict "it holds" and y whether it does (Brier 1950); ``ece``, the expected calibration error
    of p in ``BINS`` bins (Guo et al., arXiv 1706.04599, eq. 3, on p itself instead of the larger of p and 1 - p);
    ``calibrated_share``, the share of readable verdicts that those two are about, where that is any.

    For pairs also ``position_bias``, the accuracy of readable verdicts where the first is right minus that where the
    second is: 1 for a judge that always says "the first", -1 for "the second"; and ``swap_consistency``, over pairs
    shown in both orders: how often two verdicts, one of each order, name the same answer. A coin has 0.5.
    """
    figures: dict[str, float | None] = {}
    for kind, (rate, true, false) in _KINDS.items():
        of = {name.removeprefix(f"{kind}/"): value for name, value in sums.items() if name.startswith(f"{kind}/")}
        asked, read = of["asked/true"] + of["asked/false"], of["read/true"] + of["read/false"]
        located = sum(of[f"bin{b}/count"] for b in range(BINS))
        gaps = sum(abs(of[f"bin{b}/p"] - of[f"bin{b}/true"]) for b in range(BINS))
        figures |= {
            f"{kind}/failure_rate": _share(asked - read, asked),
            f"{kind}/{rate}": _share(of["correct/true"] + of["read/false"] - of["correct/false"], read),
            f"{kind}/accuracy_{true}": _share(of["correct/true"], of["asked/true"]),
            f"{kind}/accuracy_{false}": _share(of["correct/false"], of["asked/false"]),
            f"{kind}/brier": _share(of["squares"], located),
            f"{kind}/ece": _share(gaps, located),
            f"{kind}/calibrated_share": _share(located, read) or None,
        }
    first = _share(sums["judge_pair/correct/true"], sums["judge_pair/read/true"])
    second = _share(sums["judge_pair/correct/false"], sums["judge_pair/read/false"])
    figures["judge_pair/position_bias"] = None if first is None or second is None else first - second
    figures["judge_pair/swap_consistency"] = _share(sums["judge_pair/agreeing"], sums["judge_pair/swaps"])
    return {name: value for name, value in figures.items() if value is not None}


def swaps(groups: Iterable[Group]) -> tuple[float, float]:
    """Among groups of pairs: how many pairs have readable verdicts in both orders, and the sum over them of agreement.

    Agreement of a pair is the chance that one verdict of each order, drawn at random, name the same answer.
    """
    shares: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for group in groups:
        said = [v.parsed == group.task.labels[0] for v in group.verdicts if v.status == "ok"]
        if group.task.kind == "judge_pair" and said:
            firsts, n = shares.get((group.task.source, group.task.shown), (0.0, 0.0))
            shares[group.task.source, group.task.shown] = (firsts + sum(said), n + len(said))
    pairs = agreeing = 0.0
    for (source, shown), (firsts, n) in shares.items():
        if shown < shown[::-1] and (source, shown[::-1]) in shares:
            one = firsts / n
            other = 1.0 - shares[source, shown[::-1]][0] / shares[source, shown[::-1]][1]
            pairs += 1
            agreeing += one * other + (1.0 - one) * (1.0 - other)
    return pairs, agreeing


def verdict_probability(rollout: Rollout, label: str, decode: Decode) -> float | None:
    """The probability with which the sampler drew the tokens that spell the verdict, after all that it wrote before.

    Of two labels the other one then has one minus that: an approximation, since some of the rest belongs to neither.
    None where the label is not found, or where the sampler gave no log-probs. It is the probability at the temperature
    of the sampling.
    """
    span = label_span(rollout.text, label)
    where = None if span is None else covering(rollout.tokens, rollout.text, span, decode)
    if where is None:
        return None
    total = sum(rollout.logprobs[where.start : where.stop])
    return None if math.isnan(total) else min(math.exp(total), 1.0)


def covering(tokens: Sequence[int], text: str, span: tuple[int, int], decode: Decode) -> range | None:
    """The positions of the tokens that spell ``text[span[0]:span[1]]``; None where their text says otherwise.

    The text of the first k tokens grows with k, so that a bisection finds them with few decodings.
    """

    def reached(k: int) -> int:
        return len(decode(tokens[:k]))

    counts = range(len(tokens) + 1)
    first = bisect_right(counts, span[0], key=reached) - 1
    end = bisect_left(counts, span[1], key=reached)
    spelled = decode(tokens[:end])[len(decode(tokens[: max(first, 0)])) :] if end < len(counts) else ""
    return range(first, end) if text[span[0] : span[1]] in spelled else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _names() -> list[str]:
    counts = [f"{what}/{truth}" for what in ("asked", "read", "correct") for truth in ("true", "false")]
    cells = [f"bin{b}/{what}" for b in range(BINS) for what in ("count", "p", "true")]
    names = [f"{kind}/{name}" for kind in _KINDS for name in (*counts, *cells, "squares")]
    return [*names, "judge_pair/swaps", "judge_pair/agreeing"]
