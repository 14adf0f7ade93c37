"""More tokens for a question at test time: reflection, majority vote, best of n by the own judge; and what they buy.

Control flow over a ``Sample`` alone. Every method gives its stages, from the first answer on, with their whole cost.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_megatron.eval.asking import Sample
from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.judging import Decode, verdict_probability
from spark_megatron.recycle.pairwise import same_answer
from spark_megatron.recycle.pointwise import pointwise_task
from spark_megatron.recycle.reflection import reflection_task
from spark_megatron.recycle.templates import Bank, Template
from spark_megatron.tracking.intervals import wilson
from spark_megatron.types import Group, Interval, Task


@dataclass(frozen=True)
class Stage:
    """Where a method stands: the reward of its present answer to each task, and all that was spent to get there."""

    effort: int
    """Rounds of reflection, or number of answers."""
    rewards: tuple[float, ...]
    calls: int
    tokens: int
    """Generated tokens, of answers and judgements."""

    @property
    def accuracy(self) -> Interval:
        return wilson(sum(self.rewards), len(self.rewards))


@dataclass(frozen=True)
class Judge:
    """How a model is asked about its own answers: wordings, and the verifier that reads the verdicts."""

    bank: Bank
    verifier: str

    def task(self, source: Task, answer: Candidate, template: Template) -> Task:
        """Is ``answer`` right? The gold label is "right", whatever the truth: a reward of 1 is an acceptance."""
        accepted = Candidate(answer.text, answer.answer, right=True)
        return pointwise_task(source, accepted, template=template, view="answer", verifier=self.verifier)


def flips(before: Stage, after: Stage) -> tuple[int, int]:
    """How many answers became worse (right to wrong), and how many better."""
    pairs = list(zip(before.rewards, after.rewards, strict=True))
    return sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)


def reflect(first: Sequence[Group], ask: Sample, judge: Judge, rounds: int) -> list[Stage]:
    """Each answer judged by the model itself and answered anew where it is not accepted, ``rounds`` times.

    SPARK (arXiv 2509.22624, eq. 9 to 11). The last reflection is not judged: at most 1 + 2 * rounds calls per task. An
    unreadable verdict does not accept; an unreadable answer cannot be shown, and stays.
    """
    rng = random.Random(1)
    current = list(first)
    stages = [Stage(0, _first_rewards(current), len(current), _tokens(current))]
    open_ = [i for i, group in enumerate(current) if group.verdicts[0].parsed is not None]
    for effort in range(1, rounds + 1):
        judging = [judge.bank.judge_one.draw(rng, "answer") for _ in open_]
        verdicts = ask([judge.task(first[i].task, _shown(current[i]), t) for i, t in zip(open_, judging, strict=True)])
        open_ = [i for i, verdict in zip(open_, verdicts, strict=True) if verdict.rewards[0] != 1.0]
        answers = ask([_repair(first[i].task, _shown(current[i]), judge.bank, rng) for i in open_])
        for i, answer in zip(open_, answers, strict=True):
            current[i] = answer
        asked = [*verdicts, *answers]
        spent = stages[-1]
        stages.append(Stage(effort, _first_rewards(current), spent.calls + len(asked), spent.tokens + _tokens(asked)))
        open_ = [i for i in open_ if current[i].verdicts[0].parsed is not None]
    return stages


def vote(groups: Sequence[Group]) -> list[Stage]:
    """The most frequent of the first k answers, for k = 1 to n; of equally frequent ones the first."""
    kinds = [answer_kinds(group) for group in groups]

    def winner(i: int, k: int) -> int | None:
        votes = [kind for kind in kinds[i][:k] if kind is not None]
        return max(votes, key=votes.count, default=None)  # max takes the first of equals

    return [
        Stage(
            effort=k,
            rewards=tuple(_kind_reward(g, kinds[i], winner(i, k)) for i, g in enumerate(groups)),
            calls=sum(len(g.rollouts[:k]) for g in groups),
            tokens=_tokens(groups, k),
        )
        for k in _efforts(groups)
    ]


def best_of_n(groups: Sequence[Group], ask: Sample, judge: Judge, decode: Decode | None) -> list[Stage]:
    """Of the first k answers the one that the model as judge likes best, for k = 1 to n; of equals the first.

    With ``decode`` the judge's probability that the answer is right decides (where the verdict's token can be found),
    without it the verdict alone. Where all answers are equal nothing is judged, and of equal ones only one; an answer
    whose verdict cannot be read comes last.
    """
    rng = random.Random(2)
    kinds = [answer_kinds(group) for group in groups]
    distinct = [(i, kind) for i, of in enumerate(kinds) for kind in _choices(of)]
    templates = [judge.bank.judge_one.draw(rng, "answer") for _ in groups]  # one for all answers to a question
    shown = [_shown(groups[i], kinds[i].index(kind)) for i, kind in distinct]
    judged = ask([judge.task(groups[i].task, c, templates[i]) for (i, _), c in zip(distinct, shown, strict=True)])
    scores = {key: right_probability(verdict, decode) for key, verdict in zip(distinct, judged, strict=True)}
    spent = {key: len(verdict.rollouts[0].tokens) for key, verdict in zip(distinct, judged, strict=True)}

    def stage(k: int) -> Stage:
        asked = [_choices(of[:k]) for of in kinds]
        only = [next((kind for kind in of[:k] if kind is not None), None) for of in kinds]
        best = [max(of, key=lambda kind: scores[i, kind], default=only[i]) for i, of in enumerate(asked)]
        return Stage(
            effort=k,
            rewards=tuple(_kind_reward(group, kinds[i], best[i]) for i, group in enumerate(groups)),
            calls=sum(len(g.rollouts[:k]) for g in groups) + sum(map(len, asked)),
            tokens=_tokens(groups, k) + sum(spent[i, kind] for i, of in enumerate(asked) for kind in of),
        )

    return [stage(k) for k in _efforts(groups)]


def right_probability(judged: Group, decode: Decode | None) -> float:
    """How likely an answer is right by the judge's first verdict; -1, below all, where that cannot be read.

    For a task whose gold label is "right". Without ``decode``, or a verdict token to be found, 1 or 0.
    """
    verdict = judged.verdicts[0]
    if verdict.status != "ok" or verdict.parsed is None:
        return -1.0
    accepted = verdict.parsed == judged.task.labels[0]
    sure = verdict_probability(judged.rollouts[0], verdict.parsed, decode) if decode else None
    return float(accepted) if sure is None else sure if accepted else 1.0 - sure


def answer_kinds(group: Group) -> list[int | None]:
    """A number for each rollout's answer, in order of appearance and the same for equal ones; None for an unread one.

    Answers are equal as ``recycle.pairwise.same_answer`` has it.
    """
    kinds: list[int | None] = []
    known: list[Candidate] = []
    for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
        if verdict.parsed is None:
            kinds.append(None)
            continue
        answer = Candidate(rollout.text, verdict.parsed, right=False)
        kind = next((i for i, other in enumerate(known) if same_answer(answer, other)), len(known))
        known += [answer] if kind == len(known) else []
        kinds.append(kind)
    return kinds


def equal_cost(methods: Mapping[str, Sequence[Stage]]) -> tuple[int, dict[str, Interval | None]]:
    """The accuracies of all methods with the same generated tokens: the most that every one of them can spend."""
    budget = min(stages[-1].tokens for stages in methods.values())
    return budget, {name: at_tokens(stages, budget) for name, stages in methods.items()}


def at_tokens(stages: Sequence[Stage], tokens: int) -> Interval | None:
    """The accuracy with exactly that many tokens; None where the first stage needs more or the last one less.

    Between two stages a share of the tasks gets the greater effort, such that the cost is met: accuracy is linear.
    """
    for low, high in zip(stages, stages[1:] or stages, strict=False):
        if low.tokens <= tokens <= high.tokens:
            share = (tokens - low.tokens) / (high.tokens - low.tokens) if high.tokens > low.tokens else 1.0
            return wilson(sum(low.rewards) * (1 - share) + sum(high.rewards) * share, len(low.rewards))
    return None


def _choices(kinds: Sequence[int | None]) -> list[int]:
    """The different answers, in order of appearance; none where there is no choice."""
    different = sorted({kind for kind in kinds if kind is not None})
    return different if len(different) > 1 else []


def _repair(source: Task, answer: Candidate, bank: Bank, rng: random.Random) -> Task:
    # The wording must not tell what only the verifier knows.
    template = bank.reflect.draw(rng, "answer", allow_told_wrong=False)
    return reflection_task(source, answer, template=template, view="answer")


def _shown(group: Group, index: int = 0) -> Candidate:
    verdict = group.verdicts[index]
    return Candidate(group.rollouts[index].text, verdict.parsed, verdict.reward == 1.0)


def _kind_reward(group: Group, kinds: Sequence[int | None], kind: int | None) -> float:
    return 0.0 if kind is None else group.rewards[kinds.index(kind)]


def _first_rewards(groups: Sequence[Group]) -> tuple[float, ...]:
    return tuple(group.rewards[0] for group in groups)


def _efforts(groups: Sequence[Group]) -> range:
    return range(1, max((len(group.rollouts) for group in groups), default=0) + 1)


def _tokens(groups: Sequence[Group], k: int | None = None) -> int:
    return sum(len(rollout.tokens) for group in groups for rollout in group.rollouts[:k])
