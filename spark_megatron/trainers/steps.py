"""The loop around the steps of every trainer that learns from rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from spark_megatron.config import Config
from spark_megatron.tracking.clock import Clock
from spark_megatron.trainers import progress
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.period import TokenWeight, update
from spark_megatron.trainers.saves import Saves
from spark_megatron.types import Group, Metrics, Sample


class Update(Protocol):
    """``period.update`` with everything but the samples and their weights settled."""

    def __call__(self, *, samples: list[Sample], token_weight: TokenWeight) -> Metrics: ...


class OneStep(Protocol):
    """The groups that a step sampled, and what each of its periods reported, by the period's name."""

    def __call__(
        self, cfg: Config, parts: Parts, step: int, learn: Update, span: Clock
    ) -> tuple[list[Group], Mapping[str, Metrics]]: ...


def run(cfg: Config, parts: Parts, saves: Saves, one_step: OneStep) -> None:
    """All steps that are left of a run, with the start model as the reference policy."""
    with parts.hybrid.training() as engine:
        reference = engine.snapshot()
    state = saves.restore()  # the reference is the start model also where the run goes on
    for step in range(state.step, cfg.trainer.total_steps):
        with parts.track.step(step + 1) as span:
            kl_coef = parts.kl_schedule.coef(step, cfg.trainer.total_steps)
            learn = partial(update, parts, cfg, reference=reference, kl_coef=kl_coef, span=span)
            groups, stats = one_step(cfg, parts, step, learn, span)
            first = next(iter(stats.values()), {})
            if "kl" in first:
                parts.kl_schedule.observe(first["kl"])
            progress.log_step(parts, cfg, groups, stats)
            parts.track.log({"weights/kl": kl_coef})
            if cfg.trainer.eval_every and (step + 1) % cfg.trainer.eval_every == 0:
                with span("eval"):
                    progress.log_evaluation(parts, cfg, state)
        saves.step_done()
