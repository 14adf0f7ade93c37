"""One evaluation: how well the model solves, judges (pointwise and pairwise) and repairs held-out tasks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spark_megatron.eval.asking import Sample, always_answered
from spark_megatron.eval.test_time import Judge, flips, reflect
from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.distractors import near_miss
from spark_megatron.recycle.judging import judge_figures, judge_sums
from spark_megatron.recycle.pairwise import pairwise_task
from spark_megatron.recycle.pointwise import pointwise_task
from spark_megatron.recycle.templates import Bank
from spark_megatron.tracking.intervals import wilson
from spark_megatron.types import EvalResult, Group, Task


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

        ask = always_answered(sample)
        solved = ask(self.solve)
        judged = ask(self.judge_one)
        paired = ask(self.judge_pair)
        n = len(self.solve)
        stages = reflect(solved, ask, Judge(self.bank, self.judge_verifier), self.rounds)
        worse, better = flips(stages[0], stages[-1])
        statuses = Counter(f"{g.task.kind}/{g.verdicts[0].status}" for g in [*solved, *judged, *paired])
        return EvalResult(
            solve=wilson(_right(solved), n),
            judge_one=wilson(_right(judged), n),
            judge_pair=wilson(_right(paired) / 2, n),
            reflect=stages[-1].accuracy,
            counts=dict(statuses) | {"flips/right_to_wrong": worse, "flips/wrong_to_right": better},
            judging=judge_figures(judge_sums([*judged, *paired], decode=None)),  # greedy: no probabilities
        )


def _right(groups: Sequence[Group]) -> float:
    return sum(group.rewards[0] for group in groups)


def as_json(result: EvalResult) -> dict[str, Any]:
    """The form that eval.json holds per evaluation."""
    return asdict(result)


def as_metrics(result: EvalResult) -> dict[str, float]:
    """The accuracies, and how the judgements came out, under the names of metrics.jsonl."""
    accuracies = {f"eval/{name}": getattr(result, name).acc for name in ("solve", "judge_one", "judge_pair", "reflect")}
    return accuracies | {f"eval_judging/{name}": value for name, value in result.judging.items()}
