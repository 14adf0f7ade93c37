"""One evaluation: how well the model solves, judges (pointwise and pairwise) and repairs held-out tasks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.distractors import near_miss
from spark_megatron.recycle.judging import judge_figures, judge_sums
from spark_megatron.recycle.pairwise import pairwise_task
from spark_megatron.recycle.pointwise import pointwise_task
from spark_megatron.recycle.reflection import reflection_task
from spark_megatron.recycle.templates import Bank
from spark_megatron.tracking.intervals import wilson
from spark_megatron.types import EvalResult, Group, Rollout, Task, Verdict

Sample = Callable[[Sequence[Task]], list[Group]]
"""Samples and checks one greedy response per task; none where the prompt leaves no room for one."""


@dataclass(frozen=True)
class Suite:
    """The items of an evaluation, fixed for a run and equal for every seed of training.

    Judge items show the gold answer or a plausible wrong one, as bare answers. ``judge_one`` is balanced;
    ``judge_pair`` holds each pair in both orders, the two of a pair next to each other.
    """

    solve: tuple[Task, ...]
    judge_one: tuple[Task, ...]
    judge_pair: tuple[Task, ...]
    bank: Bank
    judge_verifier: str
    rounds: int

    @classmethod
    def build(cls, tasks: Sequence[Task], *, bank: Bank, judge_verifier: str, rounds: int) -> Suite:
        """The suite on held-out ``tasks``; ``rounds`` of judging and reflecting follow the first answer."""
        rng = random.Random(0)
        ones: list[Task] = []
        pairs: list[Task] = []
        for index, task in enumerate(tasks):
            right = Candidate(task.answer, task.answer, True)
            wrong_answer = near_miss(task.answer, rng)
            wrong = Candidate(wrong_answer, wrong_answer, False)
            shown = right if index % 2 else wrong
            template = bank.judge_one.draw(rng, "answer")
            ones.append(pointwise_task(task, shown, template=template, view="answer", verifier=judge_verifier))
            template = bank.judge_pair.draw(rng, "answer")
            for pair in ((right, wrong), (wrong, right)):
                pairs.append(pairwise_task(task, *pair, template=template, view="answer", verifier=judge_verifier))
        return cls(tuple(tasks), tuple(ones), tuple(pairs), bank, judge_verifier, rounds)

    def run(self, sample: Sample) -> EvalResult:
        """Evaluate greedily; intervals are 95 % Wilson intervals, a pair of orders counting as one observation."""

        def ask(tasks: Sequence[Task]) -> list[Group]:
            return [group if group.rollouts else _cut_off(group) for group in sample(tasks)]

        solved = ask(self.solve)
        judged = ask(self.judge_one)
        paired = ask(self.judge_pair)
        n = len(self.solve)
        reflected, flips = self._reflect(solved, ask)
        statuses = Counter(f"{g.task.kind}/{g.verdicts[0].status}" for g in [*solved, *judged, *paired])
        return EvalResult(
            solve=wilson(_right(solved), n),
            judge_one=wilson(_right(judged), n),
            judge_pair=wilson(_right(paired) / 2, n),
            reflect=wilson(_right(reflected), n),
            counts=dict(statuses) | flips,
            judging=judge_figures(judge_sums([*judged, *paired], decode=None)),  # greedy: no probabilities
        )

    def _reflect(self, groups: Sequence[Group], sample: Sample) -> tuple[list[Group], dict[str, int]]:
        """The answers after self-reflection: judged by the model itself, and answered anew where it says wrong."""
        rng = random.Random(1)
        current = list(groups)
        open_ = [i for i, group in enumerate(current) if group.verdicts[0].parsed is not None]
        for _ in range(self.rounds):
            verdicts = sample([self._own_judgement(current[i], rng) for i in open_])
            # The gold label of an own judgement is "right": a reward of 1 means that the model accepts its answer.
            open_ = [i for i, verdict in zip(open_, verdicts, strict=True) if verdict.rewards[0] != 1.0]
            tasks = [self._repair(current[i], rng) for i in open_]
            for i, answer in zip(open_, sample(tasks), strict=True):
                current[i] = Group(self.solve[i], answer.prompt_tokens, answer.rollouts, answer.verdicts)
            open_ = [i for i in open_ if current[i].verdicts[0].parsed is not None]
        pairs = list(zip(groups, current, strict=True))
        return current, {
            "flips/right_to_wrong": sum(a.rewards[0] > b.rewards[0] for a, b in pairs),
            "flips/wrong_to_right": sum(a.rewards[0] < b.rewards[0] for a, b in pairs),
        }

    def _own_judgement(self, group: Group, rng: random.Random) -> Task:
        accepted = Candidate(_shown(group).text, _shown(group).answer, right=True)
        template = self.bank.judge_one.draw(rng, "answer")
        return pointwise_task(group.task, accepted, template=template, view="answer", verifier=self.judge_verifier)

    def _repair(self, group: Group, rng: random.Random) -> Task:
        # The wording must not tell what only the verifier knows.
        template = self.bank.reflect.draw(rng, "answer", allow_told_wrong=False)
        return reflection_task(group.task, _shown(group), template=template, view="answer")


def _cut_off(group: Group) -> Group:
    """The group with a response that ends before its first token: wrong, since nobody may skip an item."""
    return replace(group, rollouts=(Rollout((), (), "", "length", -1),), verdicts=(Verdict("truncated"),))


def _shown(group: Group) -> Candidate:
    verdict = group.verdicts[0]
    return Candidate(group.rollouts[0].text, verdict.parsed, verdict.reward == 1.0)


def _right(groups: Sequence[Group]) -> float:
    return sum(group.rewards[0] for group in groups)


def as_json(result: EvalResult) -> dict[str, Any]:
    """The form that eval.json holds per evaluation."""
    return asdict(result)


def as_metrics(result: EvalResult) -> dict[str, float]:
    """The accuracies, and how the judgements came out, under the names of metrics.jsonl."""
    accuracies = {f"eval/{name}": getattr(result, name).acc for name in ("solve", "judge_one", "judge_pair", "reflect")}
    return accuracies | {f"eval_judging/{name}": value for name, value in result.judging.items()}
