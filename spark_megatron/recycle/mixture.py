"""Which tasks a step's verified groups become."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from spark_megatron.recycle.candidates import Candidate, answered, candidates
from spark_megatron.recycle.pairwise import pairwise_task, same_answer
from spark_megatron.recycle.pointwise import pointwise_task
from spark_megatron.recycle.reflection import reflection_task
from spark_megatron.recycle.templates import VIEWS, Bank, View
from spark_megatron.types import Group, Task

_T = TypeVar("_T")


class Recycler:
    """Makes at most one judge and one reflection task from each checked group of solutions.

    SPARK (arXiv 2509.22624, section 3.2) with the proportions of its release: a group with right answers only or wrong
    answers only becomes a pointwise item; a mixed one becomes a pair with probability ``pairwise_prob``, else a
    pointwise item of either class; any group with a wrong rollout may also become a reflection.

    ``bank``: the prompt templates. ``judge_view``: what of a solution a judge sees. ``judge_verifier``: the name of
    the verifier of judge tasks. ``max_judge``, ``max_reflection``: the most items of a call, drawn uniformly.
    ``balance_pointwise``: drop pointwise items of the more frequent class until both are equal, so that a policy that
    is nearly always right does not make a judge that always agrees (ours). ``reflect_cot_share``: the share of
    reflections that show the whole solution instead of its answer. ``reflect_correct_share``: the largest share of
    reflections on right solutions (ours; the release has none, which teaches to always revise).
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
        balance_pointwise: bool,
        reflect_cot_share: float,
        reflect_correct_share: float,
    ) -> None:
        if judge_view not in VIEWS:
            raise ValueError(f"judge_view={judge_view!r}: must be one of {list(VIEWS)}")
        shares = {
            "pairwise_prob": pairwise_prob,
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
        self._pairwise_prob, self._balance = pairwise_prob, balance_pointwise
        self._max_judge, self._max_reflection = max_judge, max_reflection
        self._cot_share, self._correct_share = reflect_cot_share, reflect_correct_share

    def __call__(self, groups: Sequence[Group], rng: random.Random) -> list[Task]:
        """The new tasks in random order; groups that are not of kind "solve" make none."""
        solved = [(group.task, *candidates(group)) for group in groups if group.task.kind == "solve"]
        tasks = self._judges(solved, rng) + self._reflections(solved, rng)
        rng.shuffle(tasks)
        return tasks

    def _judges(self, solved: list[tuple[Task, list[Candidate], list[Candidate]]], rng: random.Random) -> list[Task]:
        pairs: list[Task] = []
        points: dict[bool, list[Task]] = {True: [], False: []}
        for task, all_right, all_wrong in solved:
            right, wrong = answered(all_right), answered(all_wrong)
            if right and all_wrong and rng.random() < self._pairwise_prob:
                pair = _draw_pair(right, wrong, rng)
                if pair is not None:
                    pairs.append(
                        pairwise_task(
                            task,
                            *pair,
                            part=self._bank.judge_pair,
                            view=self._view,
                            verifier=self._verifier,
                            rng=rng,
                        )
                    )
                    continue
            classes = [options for options in (right, wrong) if options]
            if classes:
                chosen = rng.choice(rng.choice(classes))
                points[chosen.right].append(
                    pointwise_task(
                        task, chosen, part=self._bank.judge_one, view=self._view, verifier=self._verifier, rng=rng
                    )
                )
        if self._balance:
            size = min(map(len, points.values()))
            points = {right: rng.sample(items, size) for right, items in points.items()}
        return _at_most(self._max_judge, pairs + points[True] + points[False], rng)

    def _reflections(
        self, solved: list[tuple[Task, list[Candidate], list[Candidate]]], rng: random.Random
    ) -> list[Task]:
        chosen: list[tuple[Task, list[Candidate]]] = []
        n_right = 0
        for task, right, wrong in rng.sample(solved, len(solved)):
            if len(chosen) == self._max_reflection:
                break
            if right and n_right + 1 <= self._correct_share * (len(chosen) + 1):
                chosen.append((task, right))
                n_right += 1
            elif wrong and (answered(wrong) or self._cot_share > 0):
                chosen.append((task, wrong))
        n_cot = round(self._cot_share * len(chosen))
        # A group without a readable answer can only show whole solutions, so those come first; the rest is random.
        chosen.sort(key=lambda item: bool(answered(item[1])))
        tasks = []
        for index, (task, options) in enumerate(chosen):
            view: View = "cot" if index < n_cot or not answered(options) else "answer"
            candidate = rng.choice(options if view == "cot" else answered(options))
            tasks.append(reflection_task(task, candidate, part=self._bank.reflect, view=view, rng=rng))
        return tasks


def _draw_pair(
    right: list[Candidate], wrong: list[Candidate], rng: random.Random
) -> tuple[Candidate, Candidate] | None:
    """A random right and a random wrong candidate with different answers, in random order; None if all are equal."""
    chosen = rng.choice(right)
    others = [option for option in wrong if not same_answer(option, chosen)]
    if not others:
        return None
    other = rng.choice(others)
    return (other, chosen) if rng.random() < 0.5 else (chosen, other)


def _at_most(limit: int, items: list[_T], rng: random.Random) -> list[_T]:
    return items if len(items) <= limit else rng.sample(items, limit)
