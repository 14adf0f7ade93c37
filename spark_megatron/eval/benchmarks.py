"""Benchmarks in files with one JSON object a line: questions to solve, and answers to judge in three forms."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spark_megatron.data.sources import TaskSource
from spark_megatron.eval.test_time import right_probability
from spark_megatron.recycle.candidates import Candidate
from spark_megatron.recycle.judging import Decode
from spark_megatron.recycle.pairwise import pairwise_task
from spark_megatron.recycle.pointwise import pointwise_task
from spark_megatron.recycle.templates import Bank, Template
from spark_megatron.tracking.intervals import wilson
from spark_megatron.types import Group, Interval, Task

MATH = "Math"
"""The subset that the tables of the paper show by itself."""


@dataclass(frozen=True)
class Judged:
    """How the items of a judge benchmark came out: all, and those of each named subset."""

    accuracy: Interval
    subsets: Mapping[str, Interval] = field(default_factory=dict)
    verdicts: int = 0
    unread: int = 0
    """Verdicts that could not be read; they are not right."""
    left_out: int = 0
    """Rows without exactly one best answer."""


class JudgeBenchmark(Protocol):
    """Judge tasks, and what the checked answers to them say."""

    tasks: Sequence[Task]

    def judged(self, groups: Sequence[Group], decode: Decode) -> Judged: ...


class Questions:
    """A benchmark to solve: all questions of ``source``."""

    def __init__(self, *, source: TaskSource) -> None:
        self.tasks = source.tasks("benchmark")


class BestOf:
    """The right answer among several, in the form of RewardBench 2 (arXiv 2506.01937), one answer at a time.

    A row has ``prompt``, ``chosen`` (a list with the best answer) and ``rejected`` (a list of the others). The judge
    sees each answer alone; the item is right where the best one has the highest probability of being right, and
    between equals the point is shared. Rows with several best answers (the benchmark's "Ties") are left out, since
    they have a score of their own. ``subset_field`` names the field with the subset, null for none.
    """

    def __init__(self, *, path: str, bank: Bank, judge_verifier: str, subset_field: str | None) -> None:
        rows, rng = _rows(path), random.Random(0)
        kept = [(row, where) for row, where in rows if len(_texts(row, "chosen", where)) == 1]
        self._left_out, self._subsets = len(rows) - len(kept), _subsets(kept, subset_field)
        self._sizes: list[int] = []
        self.tasks: list[Task] = []
        for row, where in kept:
            source = _source(_text(row, "prompt", where), where)
            template = bank.judge_one.draw(rng, "cot")
            answers = [*_texts(row, "chosen", where), *_texts(row, "rejected", where)]
            if len(answers) < 2:
                raise ValueError(f"{where}: 'rejected' holds no answer")
            self._sizes.append(len(answers))
            for i, text in enumerate(answers):
                shown = Candidate(text, text, right=i == 0)
                task = pointwise_task(source, shown, template=template, view="cot", verifier=judge_verifier)
                self.tasks.append(task)

    def judged(self, groups: Sequence[Group], decode: Decode) -> Judged:
        credits, at = [], 0
        for size in self._sizes:
            scores = [right_probability(group, decode) for group in groups[at : at + size]]
            best = max(scores)
            credits.append(1.0 / scores.count(best) if scores[0] == best >= 0.0 else 0.0)
            at += size
        return _judged(credits, self._subsets, groups, self._left_out)


class Pairs:
    """The better of two answers, in the form of VL-RewardBench (arXiv 2411.17451), each pair shown in both orders.

    A row has ``query``, ``response`` (a list of two answers) and ``human_ranking`` (the rank of each, the lower the
    better). Its accuracy is the mean over both orders. Rows whose two ranks are equal are left out. The models of this
    program read text alone: a row with an ``image`` is refused.
    """

    def __init__(self, *, path: str, bank: Bank, judge_verifier: str, subset_field: str | None) -> None:
        rows, rng = _rows(path), random.Random(0)
        kept = [(row, where) for row, where in rows if len(set(_ranks(row, where))) == 2]
        self._left_out, self._subsets = len(rows) - len(kept), _subsets(kept, subset_field)
        self.tasks: list[Task] = []
        for row, where in kept:
            if row.get("image") is not None:
                raise ValueError(
                    f"{where}: has an image, which no model here can see; without the field the text is judged"
                )
            source, ranks = _source(_text(row, "query", where), where), _ranks(row, where)
            texts = _texts(row, "response", where)
            if len(texts) != 2:
                raise ValueError(f"{where}: 'response' must be a list of two answers, it has {len(texts)}")
            pair = [Candidate(text, text, rank == min(ranks)) for text, rank in zip(texts, ranks, strict=True)]
            template = bank.judge_pair.draw(rng, "cot")
            for one, other in (pair, pair[::-1]):
                task = pairwise_task(source, one, other, template=template, view="cot", verifier=judge_verifier)
                self.tasks.append(task)

    def judged(self, groups: Sequence[Group], decode: Decode) -> Judged:
        rewards = [group.rewards[0] for group in groups]
        credits = [(a + b) / 2 for a, b in zip(rewards[::2], rewards[1::2], strict=True)]
        return _judged(credits, self._subsets, groups, self._left_out)


class WithReference:
    """Does an answer match the reference? In the form of VerifyBench (arXiv 2505.15801).

    A row has ``question``, ``answer`` (the reference), ``completion`` (what is judged) and ``gold_correct`` (true or
    false). ``template`` is the prompt, with the fields {question}, {reference} and {shown}; ``labels`` are its words
    for a match and for none.
    """

    def __init__(
        self, *, path: str, template: str, labels: Sequence[str], judge_verifier: str, subset_field: str | None
    ) -> None:
        missing = [name for name in ("question", "reference", "shown") if f"{{{name}}}" not in template]
        if missing:
            raise ValueError(f"template={template[:60]!r}: lacks the field {{{missing[0]}}}")
        rows, wording = _rows(path), Template(template, {}, tuple(labels))
        self._subsets = _subsets(rows, subset_field)
        self.tasks = [_reference_task(row, where, wording, judge_verifier) for row, where in rows]

    def judged(self, groups: Sequence[Group], decode: Decode) -> Judged:
        return _judged([group.rewards[0] for group in groups], self._subsets, groups, 0)


def _reference_task(row: Mapping[str, Any], where: str, wording: Template, verifier: str) -> Task:
    texts = {name: _text(row, name, where) for name in ("question", "answer", "completion")}
    if not isinstance(row.get("gold_correct"), bool):
        raise ValueError(f"{where}: 'gold_correct' must be true or false, not {row.get('gold_correct')!r}")
    fields = {"question": texts["question"], "reference": texts["answer"], "shown": texts["completion"]}
    label = wording.labels[0 if row["gold_correct"] else 1]
    shown = (texts["completion"],)
    prompt = wording.prompt(fields)
    return Task(where, "judge_one", prompt, label, verifier, texts["question"], shown=shown, labels=wording.labels)


def _judged(credits: Sequence[float], subsets: Sequence[str | None], groups: Sequence[Group], left_out: int) -> Judged:
    parts: dict[str, list[float]] = defaultdict(list)
    for credit, subset in zip(credits, subsets, strict=True):
        if subset is not None:
            parts[subset].append(credit)
    return Judged(
        accuracy=wilson(sum(credits), len(credits)),
        subsets={name: wilson(sum(part), len(part)) for name, part in sorted(parts.items())},
        verdicts=len(groups),
        unread=sum(group.verdicts[0].status != "ok" for group in groups),
        left_out=left_out,
    )


def _rows(path: str) -> list[tuple[dict[str, Any], str]]:
    """The objects of a file, each with its place; ValueError for one that is none, or where there is no row."""
    if not Path(path).is_file():
        raise ValueError(f"path={path}: there is no such file; bring the benchmark there, or say where it lies")
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: is no JSON object but {type(row).__name__}")
            rows.append((row, f"{path}:{number}"))
    if not rows:
        raise ValueError(f"path={path}: has no rows")
    return rows


def _subsets(rows: Sequence[tuple[Mapping[str, Any], str]], name: str | None) -> list[str | None]:
    return [None if name is None or row.get(name) is None else str(row[name]) for row, _ in rows]


def _source(question: str, where: str) -> Task:
    """What judge tasks are made from; nobody solves it."""
    return Task(where, "solve", question, "", "", question)


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(row.get(name), str) or not row[name].strip():
        raise ValueError(f"{where}: needs a text {name!r}; the row has {sorted(row)}")
    return str(row[name])


def _texts(row: Mapping[str, Any], name: str, where: str) -> list[str]:
    texts = row.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: needs a list of texts {name!r}; the row has {sorted(row)}")
    return texts


def _ranks(row: Mapping[str, Any], where: str) -> list[int]:
    ranks = row.get("human_ranking")
    if not isinstance(ranks, list) or len(ranks) != 2 or not all(isinstance(rank, int) for rank in ranks):
        raise ValueError(f"{where}: 'human_ranking' must be two ranks, not {ranks!r}")
    return ranks
