"""Judge tasks that owe nothing to the policy: a baseline for what recycling of its own rollouts is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

from spark_megatron.recycle.distractors import near_miss
from spark_megatron.recycle.mixture import Recycler
from spark_megatron.types import Group, Rollout, Task, Verdict


class Offline(Recycler):
    """Recycles, in place of a question's rollouts, its gold answer and a plausible wrong one, as bare answers.

    The paper (arXiv 2509.22624) compares with "Policy & Reward" training and does not say where that one's judge data
    come from; this is ours.
    """

    def __call__(self, groups: Sequence[Group], rng: random.Random) -> list[Task]:
        return super().__call__([_example(g.task, rng) for g in groups if g.task.kind == "solve"], rng)


def _example(task: Task, rng: random.Random) -> Group:
    """A group of one right and one wrong answer."""
    answers = (task.answer, near_miss(task.answer, rng))
    rollouts = tuple(Rollout((), (), f"\\boxed{{{answer}}}", "stop", -1) for answer in answers)
    return Group(
        task, (), rollouts, tuple(Verdict("ok", reward, a) for reward, a in zip((1.0, 0.0), answers, strict=True))
    )
