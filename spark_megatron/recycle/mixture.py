"""Which tasks a step's verified groups become."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spark_megatron.recycle.balance import alternating, halves, spread
from spark_megatron.recycle.candidates import Candidate, answered, candidates
from spark_megatron.recycle.pairwise import pairwise_task, same_answer
from spark_megatron.recycle.pointwise import pointwise_task
from spark_megatron.recycle.reflection import reflection_task
from spark_megatron.recycle.templates import VIEWS, Bank, View
from spark_megatron.types import Group, Task


@dataclass(frozen=True)
class _Solved:
    """A task with its right and its wrong candidates."""

    task: Task
    right: list[Candidate]
    wrong: list[Candidate]


@dataclass(frozen=True)
class _Pair:
    task: Task
    right: Candidate
    wrong: Candidate


_Point = tuple[Task, Candidate]


class Recycler:
    """Makes at most one judge and one reflection task from each checked group of solutions.

    SPARK (arXiv 2509.22624, section 3.2) with the proportions of its release: a group with right answers only or wrong
    answers only becomes a pointwise item; a mixed one becomes a pair with probability ``pairwise_prob``, else a
    pointwise item of either class; any group with a wrong rollout may also become a reflection.

    What a call makes is balanced (ours; the release tosses coins): the order of pairs, the class of pointwise items on
    mixed groups and the templates of each kind come equally often, give or take one. All ranks of a job call it with
    the groups of all of them and equal generators, so that this holds for the batch of the whole job.

    ``bank``: the prompt templates. ``judge_view``: what of a solution a judge sees. ``judge_verifier``: the name of
    the verifier of judge tasks. ``max_judge``, ``max_reflection``: the most items of a call, drawn uniformly.
    ``both_orders_share``: the share of pairs that are shown in both orders, as two items, which measures how often a
    judge stays with its choice (ours). ``balance_pointwise``: drop pointwise items of the more frequent class until
    both are equal, so that a policy that is nearly always right does not make a judge that always agrees (ours).
    ``reflect_cot_share``: the share of reflections that show the whole solution instead of its answer.
    ``reflect_correct_share``: the largest share of reflections on right solutions (ours; the release has none, which
    teaches to always revise).
    """

    def __init__(
        self,
        *,
        bank: Bank,
        judge_view: View,
        judge_verifier: str,
        pairwise_prob: float,
        max_judge: int,
        max_reflection: int,
        both_orders_share: float,
        balance_pointwise: bool,
        reflect_cot_share: float,
        reflect_correct_share: float,
    ) -> None:
        if judge_view not in VIEWS:
            raise ValueError(f"judge_view={judge_view!r}: must be one of {list(VIEWS)}")
        shares = {
            "pairwise_prob": pairwise_prob,
            "both_orders_share": both_orders_share,
            "reflect_cot_share": reflect_cot_share,
            "reflect_correct_share": reflect_correct_share,
        }
        for name, share in shares.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name}={share}: must lie in [0, 1]")
        for name, limit in {"max_judge": max_judge, "max_reflection": max_reflection}.items():
            if limit < 0:
                raise ValueError(f"{name}={limit}: must not be negative (0 makes none)")
        self._bank, self._view, self._verifier = bank, judge_view, judge_verifier
        self._pairwise_prob, self._twins, self._balance = pairwise_prob, both_orders_share, balance_pointwise
        self._max_judge, self._max_reflection = max_judge, max_reflection
        self._cot_share, self._correct_share = reflect_cot_share, reflect_correct_share

    def __call__(self, groups: Sequence[Group], rng: random.Random) -> list[Task]:
        """The new tasks, the kinds evenly mixed; groups that are not of kind "solve" make none."""
        solved = [_Solved(group.task, *candidates(group)) for group in groups if group.task.kind == "solve"]
        pairs, right, wrong = self._choose_judges(solved, rng)
        return spread([self._points(right, wrong, rng), self._pairs(pairs, rng), self._reflections(solved, rng)], rng)

    def _choose_judges(
        self, solved: list[_Solved], rng: random.Random
    ) -> tuple[list[_Pair], list[_Point], list[_Point]]:
        """The pairs, and the pointwise items on right and on wrong candidates, within the limit."""
        pairs: list[_Pair] = []
        right: list[_Solved] = []
        wrong: list[_Solved] = []
        either: list[_Solved] = []
        for group in solved:
            rights, wrongs = answered(group.right), answered(group.wrong)
            if rights and group.wrong and rng.random() < self._pairwise_prob:
                pair = _draw_pair(group.task, rights, wrongs, rng)
                if pair is not None:
                    pairs.append(pair)
                    continue
            if rights and wrongs:
                either.append(group)
            elif rights or wrongs:
                (right if rights else wrong).append(group)
        # Halves also where one class is rare: else it would come from hard questions alone, and a judge could tell it
        # by them.
        also_right, also_wrong = halves(either, rng)
        right, wrong = right + also_right, wrong + also_wrong
        if self._balance:
            size = min(len(right), len(wrong))
            right, wrong = rng.sample(right, size), rng.sample(wrong, size)
        n_pairs, n_right, n_wrong = self._within_limit(len(pairs), len(right), len(wrong), rng)
        return (
            rng.sample(pairs, n_pairs),
            [(group.task, rng.choice(answered(group.right))) for group in rng.sample(right, n_right)],
            [(group.task, rng.choice(answered(group.wrong))) for group in rng.sample(wrong, n_wrong)],
        )

    def _within_limit(self, n_pairs: int, n_right: int, n_wrong: int, rng: random.Random) -> tuple[int, int, int]:
        """How many of each stay where there are too many: as a uniform draw of the items has it."""
        both = round(self._twins * n_pairs)
        items = Counter({"pair": n_pairs + both, "right": n_right, "wrong": n_wrong})
        if items.total() <= self._max_judge:
            return n_pairs, n_right, n_wrong
        kept = Counter(rng.sample(list(items), self._max_judge, counts=list(items.values())))
        if self._balance:
            points = kept["right"] + kept["wrong"]
            kept["right"] = (points + rng.randrange(2)) // 2
            kept["wrong"] = points - kept["right"]
        pairs = kept["pair"]
        while pairs + round(self._twins * pairs) > kept["pair"]:
            pairs -= 1
        return pairs, kept["right"], kept["wrong"]

    def _points(self, right: Sequence[_Point], wrong: Sequence[_Point], rng: random.Random) -> list[Task]:
        chosen = [*right, *wrong]
        templates = self._bank.judge_one.deal(len(chosen), rng, self._view)
        tasks = [
            pointwise_task(task, candidate, template=template, view=self._view, verifier=self._verifier)
            for (task, candidate), template in zip(chosen, templates, strict=True)
        ]
        return spread([tasks[: len(right)], tasks[len(right) :]], rng)

    def _pairs(self, chosen: Sequence[_Pair], rng: random.Random) -> list[Task]:
        templates = self._bank.judge_pair.deal(len(chosen), rng, self._view)
        n_both = round(self._twins * len(chosen))
        once = alternating(len(chosen) - n_both, len(self._bank.judge_pair.options(self._view)), rng)
        orders = [(True, False)] * n_both + [(right_first,) for right_first in once]
        tasks = []
        for pair, template, right_firsts in zip(chosen, templates, orders, strict=True):
            for right_first in right_firsts:
                shown = (pair.right, pair.wrong) if right_first else (pair.wrong, pair.right)
                tasks.append(
                    pairwise_task(pair.task, *shown, template=template, view=self._view, verifier=self._verifier)
                )
        return tasks

    def _reflections(self, solved: list[_Solved], rng: random.Random) -> list[Task]:
        chosen: list[tuple[Task, list[Candidate]]] = []
        n_right = 0
        for group in rng.sample(solved, len(solved)):
            if len(chosen) == self._max_reflection:
                break
            if group.right and n_right + 1 <= self._correct_share * (len(chosen) + 1):
                chosen.append((group.task, group.right))
                n_right += 1
            elif group.wrong and (answered(group.wrong) or self._cot_share > 0):
                chosen.append((group.task, group.wrong))
        n_cot = round(self._cot_share * len(chosen))
        # A group without a readable answer can only show whole solutions, so those come first; the rest is random.
        chosen.sort(key=lambda item: bool(answered(item[1])))
        shown: dict[tuple[View, bool], list[_Point]] = {}
        for index, (task, options) in enumerate(chosen):
            view: View = "cot" if index < n_cot or not answered(options) else "answer"
            candidate = rng.choice(options if view == "cot" else answered(options))
            shown.setdefault((view, candidate.right), []).append((task, candidate))
        made = []
        for (view, right), items in shown.items():
            templates = self._bank.reflect.deal(len(items), rng, view, allow_told_wrong=not right)
            made.append(
                [
                    reflection_task(*item, template=template, view=view)
                    for item, template in zip(items, templates, strict=True)
                ]
            )
        return spread(made, rng)


def _draw_pair(task: Task, right: list[Candidate], wrong: list[Candidate], rng: random.Random) -> _Pair | None:
    """A random right and a random wrong candidate with different answers; None if all are equal."""
    chosen = rng.choice(right)
    others = [option for option in wrong if not same_answer(option, chosen)]
    return _Pair(task, chosen, rng.choice(others)) if others else None
