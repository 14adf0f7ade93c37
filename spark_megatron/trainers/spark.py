"""SPARK (arXiv 2509.22624): one model learns to solve tasks and, from the same rollouts, to judge and to repair."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from spark_megatron.algos.unified import component_coefs, merged_coefs
from spark_megatron.config import Config
from spark_megatron.data.samples import supervised_samples
from spark_megatron.recycle.supervised import with_targets
from spark_megatron.tracking.clock import Clock
from spark_megatron.trainers import progress
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.period import (
    COMPONENT_OF,
    TokenWeight,
    advantage_samples,
    rollouts,
    solve_rollouts,
    update,
)
from spark_megatron.trainers.saves import Saves
from spark_megatron.types import Component, Group, Metrics, Sample


class Update(Protocol):
    """``period.update`` with everything but the samples and their weights settled."""

    def __call__(self, *, samples: list[Sample], token_weight: TokenWeight) -> Metrics: ...


def train(cfg: Config, parts: Parts, saves: Saves) -> None:
    """Alternate solve and reward periods (the paper), or learn from both kinds in one joint update (ours)."""
    one_step = alternating if cfg.objective.update == "alternating" else joint
    with parts.hybrid.training() as engine:
        reference = engine.snapshot()
    state = saves.restore()  # the reference is the start model also where the run goes on
    for step in range(state.step, cfg.trainer.total_steps):
        with parts.track.step(step + 1) as span:
            kl_coef = parts.kl_schedule.coef(step, cfg.trainer.total_steps)
            weights = parts.weight_schedule.weights(step, cfg.trainer.total_steps) if one_step is joint else {}
            learn = partial(update, parts, cfg, reference=reference, kl_coef=kl_coef, span=span)
            groups, stats = one_step(cfg, parts, step, weights, learn, span)
            if "kl" in stats[0]:
                parts.kl_schedule.observe(stats[0]["kl"])
            progress.log_step(parts, cfg, groups, stats, {**weights, "kl": kl_coef})
            if cfg.trainer.eval_every and (step + 1) % cfg.trainer.eval_every == 0:
                with span("eval"):
                    progress.log_evaluation(parts, cfg, state)
        saves.step_done()


def alternating(
    cfg: Config, parts: Parts, step: int, weights: Mapping[Component, float], learn: Update, span: Clock
) -> tuple[list[Group], list[Metrics]]:
    """A solve period; then, once enough recycled tasks wait, a reward period on the oldest of them.

    Each period is a plain token mean over its own responses: the objective weights play no part.
    """
    groups = solve_rollouts(parts, cfg, step, span)
    parts.pool.add(parts.recycler(groups, parts.rng))
    stats = [learn(samples=advantage_samples(parts, cfg, groups), token_weight=merged_coefs)]
    if len(parts.pool) >= cfg.trainer.tasks_per_step:
        judged = rollouts(parts, cfg, parts.pool.take(cfg.trainer.tasks_per_step), (step, "reward"), span)
        stats.append(learn(samples=advantage_samples(parts, cfg, judged), token_weight=merged_coefs))
        groups += judged
    return groups, stats


def joint(
    cfg: Config, parts: Parts, step: int, weights: Mapping[Component, float], learn: Update, span: Clock
) -> tuple[list[Group], list[Metrics]]:
    """One update on solutions and on the tasks recycled from them, each component over its own token count.

    Kinds in supervised mode learn their known answer by cross-entropy; those in rl mode are sampled with the same
    weights and learn from their own verified rollouts.
    """
    groups = solve_rollouts(parts, cfg, step, span)
    recycled = parts.recycler(groups, parts.rng)
    modes = {name: getattr(cfg.objective, name).mode for name in ("pointwise", "pairwise", "reflection")}
    taught = [task for task in recycled if modes[COMPONENT_OF[task.kind]] == "supervised"]
    tried = [task for task in recycled if modes[COMPONENT_OF[task.kind]] == "rl"]
    targets = with_targets(taught, groups, parts.rng)
    if tried:
        groups += rollouts(parts, cfg, tried, (step, "reward"), span)
    samples = advantage_samples(parts, cfg, groups) + supervised_samples(targets, parts.tokenizer, COMPONENT_OF)
    return groups, [learn(samples=samples, token_weight=partial(component_coefs, weights))]
