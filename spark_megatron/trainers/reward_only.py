"""The baseline that learns to judge and to repair from its own solutions, and never to solve."""

from __future__ import annotations

from spark_megatron.config import Config
from spark_megatron.tracking.clock import Clock
from spark_megatron.trainers import steps
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.period import rollouts
from spark_megatron.trainers.saves import Saves
from spark_megatron.trainers.spark import reward_period
from spark_megatron.trainers.steps import Update
from spark_megatron.types import Group, Metrics


def train(cfg: Config, parts: Parts, saves: Saves) -> None:
    """The reward periods of SPARK alone ("Reward-Only" of arXiv 2509.22624, Tables 1 and 2)."""
    steps.run(cfg, parts, saves, one_step)


def one_step(
    cfg: Config, parts: Parts, step: int, learn: Update, span: Clock
) -> tuple[list[Group], dict[str, Metrics]]:
    """Solutions are sampled and recycled; an update follows once enough of what they became waits."""
    groups = rollouts(parts, cfg, parts.stream.take(cfg.trainer.tasks_per_step), (step, "solve"), span)
    parts.pool.add(parts.recycler(groups, parts.rng))
    judged, stats = reward_period(cfg, parts, step, learn, span)
    return groups + judged, stats
