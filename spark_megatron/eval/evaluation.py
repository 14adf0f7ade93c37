"""A whole evaluation of a model: questions to solve, by all methods of test time, and judge benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from spark_megatron.eval.asking import always_answered
from spark_megatron.eval.at_k import at_k
from spark_megatron.eval.benchmarks import JudgeBenchmark, Judged
from spark_megatron.eval.tables import Solved
from spark_megatron.eval.test_time import Judge, Stage, answer_kinds, best_of_n, reflect, vote
from spark_megatron.recycle.judging import Decode
from spark_megatron.types import Group, Task

Ask = Callable[[str, Sequence[Task], int], list[Group]]
"""``ask(what, tasks, n)``: n checked answers to each task, or one greedy one for n = 0; ``what`` is for display."""

Method = Literal["reflect", "vote", "best_of_n"]


@dataclass(frozen=True)
class Evaluator:
    """What is asked of a model: ``samples`` answers to each question beside the greedy one, and ``methods``."""

    ask: Ask
    judge: Judge
    decode: Decode
    methods: tuple[Method, ...]
    rounds: int
    samples: int
    ks: tuple[int, ...]
    score: Literal["soft", "hard"]

    def solve(self, name: str, tasks: Sequence[Task]) -> Solved:
        """Answers to questions: greedy ones, several per question, and what each method makes of them."""
        greedy = self._all(f"{name}: answers", tasks)
        stages: dict[str, list[Stage]] = {}
        if "reflect" in self.methods:
            ask = partial(self._all, f"{name}: reflection")
            stages["reflect"] = reflect(greedy, ask, self.judge, self.rounds)
        several = self._all(f"{name}: {self.samples} answers each", tasks, self.samples) if self.samples else []
        if "vote" in self.methods:
            stages["vote"] = vote(several)
        if "best_of_n" in self.methods:
            decode = self.decode if self.score == "soft" else None
            ask = partial(self._all, f"{name}: judging answers")
            stages["best_of_n"] = best_of_n(several, ask, self.judge, decode)
        kinds, rewards = [answer_kinds(group) for group in several], [group.rewards for group in several]
        return Solved(
            greedy=Stage(0, tuple(g.rewards[0] for g in greedy), 0, 0).accuracy,
            at_k=at_k(kinds, rewards, self.ks) if several else {},
            methods=stages,
        )

    def judged(self, name: str, benchmark: JudgeBenchmark) -> Judged:
        """The verdicts on the items of a benchmark, greedy."""
        return benchmark.judged(self._all(f"{name}: judging", benchmark.tasks), self.decode)

    def _all(self, what: str, tasks: Sequence[Task], n: int = 0) -> list[Group]:
        return always_answered(lambda asked: self.ask(what, asked, n) if asked else [])(tasks)
