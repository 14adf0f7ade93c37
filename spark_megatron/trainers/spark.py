"""SPARK (arXiv 2509.22624): one model learns to solve tasks and, from the same rollouts, to judge and to repair."""

from __future__ import annotations

from functools import partial

from spark_megatron.algos.unified import component_coefs, merged_coefs
from spark_megatron.config import Config
from spark_megatron.data.samples import supervised_samples
from spark_megatron.recycle.supervised import with_targets
from spark_megatron.tracking.clock import Clock
from spark_megatron.trainers import steps
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.period import COMPONENT_OF, advantage_samples, rollouts, solve_rollouts
from spark_megatron.trainers.saves import Saves
from spark_megatron.trainers.steps import Update
from spark_megatron.types import Group, Metrics


def train(cfg: Config, parts: Parts, saves: Saves) -> None:
    """Alternate solve and reward periods (the paper), or learn from both kinds in one joint update (ours)."""
    steps.run(cfg, parts, saves, alternating if cfg.objective.update == "alternating" else joint)


def alternating(
    cfg: Config, parts: Parts, step: int, learn: Update, span: Clock
) -> tuple[list[Group], dict[str, Metrics]]:
    """A solve period; then, once enough recycled tasks wait, a reward period on the oldest of them.

    Each period is a plain token mean over its own responses: the objective weights play no part.
    """
    groups = solve_rollouts(parts, cfg, step, span)
    parts.pool.add(parts.recycler(groups, parts.rng))
    stats = {"policy": learn(samples=advantage_samples(parts, cfg, groups), token_weight=merged_coefs)}
    judged, more = reward_period(cfg, parts, step, learn, span)
    return groups + judged, stats | more


def reward_period(
    cfg: Config, parts: Parts, step: int, learn: Update, span: Clock
) -> tuple[list[Group], dict[str, Metrics]]:
    """Fresh rollouts of the oldest recycled tasks, and an update on them; nothing where too few wait."""
    if len(parts.pool) < cfg.trainer.tasks_per_step:
        return [], {}
    judged = rollouts(parts, cfg, parts.pool.take(cfg.trainer.tasks_per_step), (step, "reward"), span)
    samples = advantage_samples(parts, cfg, judged)
    return judged, {"reward_period": learn(samples=samples, token_weight=merged_coefs)}


def joint(cfg: Config, parts: Parts, step: int, learn: Update, span: Clock) -> tuple[list[Group], dict[str, Metrics]]:
    """One update on solutions and on the tasks recycled from them, each component over its own token count.

    Kinds in supervised mode learn their known answer by cross-entropy; those in rl mode are sampled with the same
    weights and learn from their own verified rollouts.
    """
    weights = parts.weight_schedule.weights(step, cfg.trainer.total_steps)
    groups = solve_rollouts(parts, cfg, step, span)
    recycled = parts.recycler(groups, parts.rng)
    modes = {name: getattr(cfg.objective, name).mode for name in ("pointwise", "pairwise", "reflection")}
    taught = [task for task in recycled if modes[COMPONENT_OF[task.kind]] == "supervised"]
    tried = [task for task in recycled if modes[COMPONENT_OF[task.kind]] == "rl"]
    targets = with_targets(taught, groups, parts.rng)
    if tried:
        groups += rollouts(parts, cfg, tried, (step, "reward"), span)
    samples = advantage_samples(parts, cfg, groups) + supervised_samples(targets, parts.tokenizer, COMPONENT_OF)
    stats = learn(samples=samples, token_weight=partial(component_coefs, weights))
    parts.track.log({f"weights/{name}": weight for name, weight in weights.items()})
    return groups, {"policy": stats}
