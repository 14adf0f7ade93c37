"""The tasks of a solve period: what was learned about them, and others in place of those that taught nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_megatron.data.curriculum import Gaussian, Resample
from spark_megatron.data.sources import solve_task
from spark_megatron.data.stream import TaskStream
from spark_megatron.rollout.groups import Phase
from spark_megatron.trainers.period import solve_rollouts
from spark_megatron.types import Group, Rollout, Task, Verdict
from tests.settings import typed


class Numbers:
    fingerprint = "numbers"

    def tasks(self, key: str) -> list[Task]:
        made = [solve_task(f"What is {i}?", str(i), instruction=None, verifier="math") for i in range(40)]
        return random.Random(key).sample(made, len(made))


class Run:
    """Parts whose sampler solves even tasks half of the time and odd ones always."""

    def __init__(self, resample: Resample | None) -> None:
        self.asked: list[tuple[int, tuple[object, ...]]] = []
        self.order = Gaussian(target=0.5, width=0.2, explore=0.1, rate=1.0)
        stream = TaskStream(source=Numbers(), seed=0, heldout_share=0.0, order=self.order)
        self.parts: Any = SimpleNamespace(
            stream=stream,
            resample=resample,
            phases=[],
            sample=self.sample,
            hybrid=SimpleNamespace(generating=nullcontext),
            label_noise=lambda groups, seed: list(groups),
        )

    def sample(self, tasks: Sequence[Task], *, seed: tuple[object, ...], **_settings: Any) -> Phase:
        self.asked.append((len(tasks), seed))
        rollouts = (Rollout((1,), (-0.1,), "x", "stop", 0),) * 4
        groups = []
        for task in tasks:
            last = Verdict("ok", 1.0) if int(task.answer) % 2 else Verdict("error")
            verdicts = (Verdict("ok", 1.0), Verdict("ok", float(int(task.answer) % 2)), last, last)
            groups.append(Group(task, (5,), rollouts, verdicts))
        return Phase(groups, (1,))


@pytest.mark.parametrize("budget", [None, 1, 3, 100])
def test_tasks_that_taught_nothing_are_made_up_for_within_the_budget(tmp_path: Path, budget: int | None) -> None:
    run = Run(None if budget is None else Resample(budget=budget))
    cfg = typed(tmp_path, "trainer.tasks_per_step=8", "seed=5")
    groups = solve_rollouts(run.parts, cfg, 3, lambda name: nullcontext())  # type: ignore[arg-type, return-value]
    sizes = [size for size, _ in run.asked]
    assert run.asked[0] == (8, (5, 3, "solve"))
    assert len({seed for _, seed in run.asked}) == len(run.asked)
    assert len(groups) == sum(sizes)
    assert sum(sizes) - 8 <= (budget or 0)
    flat, begin = [], 0
    for size in sizes:
        flat.append(sum(int(group.task.answer) % 2 for group in groups[begin : begin + size]))
        begin += size
    assert sizes[1:] == [
        n for n in [min(flat[i], (budget or 0) - sum(sizes[1 : i + 1])) for i in range(len(sizes))] if n
    ]
    # A check that failed by itself says nothing about the task.
    assert run.order.rates == {group.task.id: 1.0 if int(group.task.answer) % 2 else 0.5 for group in groups}
