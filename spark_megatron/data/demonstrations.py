"""Demonstrations of solving, judging and reflecting for sums of single digits: a cold start for tiny models."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.distractors import near_miss
from spark_megatron.recycle.pairwise import pairwise_task
from spark_megatron.recycle.pointwise import pointwise_task
from spark_megatron.recycle.reflection import reflection_task
from spark_megatron.recycle.templates import VIEWS, Bank, View
from spark_megatron.types import TASK_KINDS, Task, TaskKind

_SUM = re.compile(r"\d(?: [+-] \d)*", re.ASCII)


class Demonstrator:
    """Works sums out loud, and errs like a learner: by the same slips again and again, not at random.

    The working lists the running values: "6 + 5 - 3" gives "11 8". With probability ``slip_prob`` each, a step that
    needs a carry or a borrow forgets it (8 + 5 gives 3, 13 - 5 gives 18), and a step that crosses zero by 4 or more
    loses the sign of its result (2 - 9 gives 7). The demonstrator goes on from the wrong value. (Ours.)
    """

    def __init__(self, *, slip_prob: float) -> None:
        if not 0.0 <= slip_prob <= 1.0:
            raise ValueError(f"slip_prob={slip_prob}: must lie in [0, 1]")
        self._prob = slip_prob

    def running_values(self, question: str, rng: random.Random) -> list[int]:
        """The first digit and the value after each operation; the last one is the demonstrator's answer."""
        first, steps = _parse(question)
        values = [first]
        for step in steps:
            exact = values[-1] + step
            values.append(_slipped(values[-1], exact) if rng.random() < self._prob else exact)
        return values


def _slipped(before: int, exact: int) -> int:
    """What a learner who forgets carries, borrows and signs writes instead of ``exact``."""
    if before >= 0 and exact >= 0 and before // 10 != exact // 10:
        return exact - 10 if exact > before else exact + 10
    if (before < 0) != (exact < 0) and exact <= -4:
        return -exact
    return exact


class Demonstrations:
    """Turns tasks that ask for a sum into (task, response) pairs of all kinds, with the prompts of ``bank``.

    Every response recomputes the sum and ends in a box: the result, or the verdict that follows from it, which is
    wrong in ``wrong_verdict_share`` of cases. ``shares`` is the mixture of kinds. A judge sees a right and a wrong
    answer equally often in ``judge_view``; a reflection shows a wrong one, ``reflect_cot_share`` of them with its
    working. Wrong answers are the demonstrator's own or near misses. ``judge_verifier`` names the verifier of judge
    tasks. The tasks' gold answers are the true ones.
    """

    def __init__(
        self,
        *,
        bank: Bank,
        demonstrator: Demonstrator,
        shares: Mapping[TaskKind, float],
        judge_view: View,
        judge_verifier: str,
        reflect_cot_share: float,
        wrong_verdict_share: float,
    ) -> None:
        if judge_view not in VIEWS:
            raise ValueError(f"judge_view={judge_view!r}: must be one of {list(VIEWS)}")
        if not set(shares) <= set(TASK_KINDS) or min(shares.values(), default=0) < 0 or sum(shares.values()) <= 0:
            raise ValueError(f"shares={dict(shares)}: give shares, not all zero, of the kinds {list(TASK_KINDS)}")
        for name, value in {"reflect_cot_share": reflect_cot_share, "wrong_verdict_share": wrong_verdict_share}.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value}: must lie in [0, 1]")
        self._bank, self._demonstrator, self._shares = bank, demonstrator, dict(shares)
        self._view, self._verifier = judge_view, judge_verifier
        self._cot_share, self._wrong_share = reflect_cot_share, wrong_verdict_share

    def __call__(self, task: Task, rng: random.Random) -> tuple[Task, str]:
        """One demonstration made from ``task``, of a kind drawn by ``shares``."""
        kinds = list(self._shares)
        kind = rng.choices(kinds, weights=[self._shares[name] for name in kinds])[0]
        values = self._demonstrator.running_values(task.question, rng)
        if kind == "solve":
            return task, _response(values, str(values[-1]))
        slipped = str(self._demonstrator.running_values(task.question, rng)[-1])
        own = rng.random() < 0.5 and slipped != task.answer
        wrong = candidate(task, slipped if own else near_miss(task.answer, rng), rng)
        if kind == "reflect":
            view: View = "cot" if rng.random() < self._cot_share else "answer"
            item = reflection_task(task, wrong, template=self._bank.reflect.draw(rng, view), view=view)
            return item, _response(values, str(values[-1]))
        right = candidate(task, task.answer, rng)
        if kind == "judge_one":
            shown = rng.choice((right, wrong))
            template = self._bank.judge_one.draw(rng, self._view)
            item = pointwise_task(task, shown, template=template, view=self._view, verifier=self._verifier)
        else:
            pair = rng.sample((right, wrong), 2)
            template = self._bank.judge_pair.draw(rng, self._view)
            item = pairwise_task(task, *pair, template=template, view=self._view, verifier=self._verifier)
        return item, _response(values, self._verdict(item, task.answer, values[-1], rng))

    def _verdict(self, item: Task, gold: str, result: int, rng: random.Random) -> str:
        """The label that follows from the demonstrator's own result; the other one in the share of wrong verdicts."""
        (other,) = set(item.labels) - {item.answer}
        if item.kind == "judge_one":
            agrees = (str(result) in item.shown) == (gold in item.shown)
        else:
            # With a result that is on neither side, the nearer answer is the better guess; of two, the first.
            distances = [abs(int(answer) - result) for answer in item.shown]
            agrees = item.shown[distances.index(min(distances))] == gold
        return item.answer if agrees == (rng.random() >= self._wrong_share) else other


def _parse(question: str) -> tuple[int, list[int]]:
    """The first digit, and what each further term adds."""
    if not _SUM.fullmatch(question):
        raise ValueError(f"{question!r} is no sum of single digits such as '6 + 5 - 3': only those are demonstrated")
    first, *rest = question.split(" ")
    return int(first), [int(sign + digit) for sign, digit in zip(rest[::2], rest[1::2], strict=True)]


def _response(values: list[int], boxed: str) -> str:
    """The working and the box. Every number follows a space, so that a tokenizer has one token for it everywhere."""
    space = "" if boxed.isalpha() else " "
    return " " + " ".join([*map(str, values[1:]), f"\\boxed{{{space}{boxed}}}"])


def candidate(task: Task, answer: str, rng: random.Random) -> Candidate:
    """A solution that ends in ``answer``: the true working, off at one step and from there on where it is wrong."""
    first, steps = _parse(task.question)
    exact = list(itertools.accumulate(steps, initial=first))
    begin = rng.randrange(len(steps)) + 1 if steps else 1
    offset = int(answer) - exact[-1]
    values = [value + (offset if index >= begin else 0) for index, value in enumerate(exact)]
    return Candidate(_response(values, answer), answer, answer == task.answer)
