"""Cooper (arXiv 2508.05613): the policy and the reward model that judges it are trained together."""

from __future__ import annotations

from collections.abc import Sequence

from spark_megatron import runtime
from spark_megatron.algos.blend import blend
from spark_megatron.algos.unified import merged_coefs
from spark_megatron.config import Config
from spark_megatron.data.pairs import Pair, make_pairs, originals
from spark_megatron.data.samples import to_samples
from spark_megatron.rewards.scoring import training_rewards, verdict_of
from spark_megatron.tracking.clock import Clock
from spark_megatron.trainers import progress, steps
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.period import COMPONENT_OF, rollouts
from spark_megatron.trainers.saves import Saves
from spark_megatron.trainers.steps import Update
from spark_megatron.types import Group, Metrics, Task, Verdict


def train(cfg: Config, parts: Parts, saves: Saves) -> None:
    """Per step: rollouts, rewards from the reward model as it is, its update on pairs, the policy's update.

    With ``reward_model.update=false`` it stays as it is: the baseline that a policy learns to hack.
    """
    steps.run(cfg, parts, saves, one_step)


def one_step(
    cfg: Config, parts: Parts, step: int, learn: Update, span: Clock
) -> tuple[list[Group], dict[str, Metrics]]:
    """Both models learn from the same rollouts."""
    judge, settings = parts.reward_model, cfg.reward_model
    assert judge is not None
    groups = rollouts(parts, cfg, parts.stream.take(cfg.trainer.tasks_per_step), (step, "solve"), span)
    with span("pairs"):
        pairs = corrupted(parts, cfg, groups, step) if settings.update else []
    with span("reward_model"), parts.hybrid.training(), judge.awake():
        scored = judge.probabilities(groups)
        learned = judge.learn_pairs(pairs, settings.anchor) if settings.update else {}
    table = cfg.objective.status_rewards.table()
    rewards = [
        blend(s, training_rewards(group, table), settings.rule_share) for s, group in zip(scored, groups, strict=True)
    ]
    samples = to_samples(groups, [parts.advantage(r) for r in rewards], COMPONENT_OF)
    stats = learn(samples=samples, token_weight=merged_coefs)
    progress.log_rewards(parts, groups, scored, learned, pairs)
    return groups, {"policy": stats}


def corrupted(parts: Parts, cfg: Config, groups: Sequence[Group], step: int) -> list[Pair]:
    """A pair from every group with a rollout that the rule calls right, as far as the assistant can make one."""
    assert parts.reward_model is not None

    def check(items: Sequence[tuple[Task, str]]) -> list[Verdict]:
        # A check can run out of time on one rank and not on another: one decides for all.
        return runtime.decided_by_zero(lambda: [verdict_of(parts.verifiers, *item) for item in items], RuntimeError)

    def ask(
        tasks: Sequence[Task], *, temperature: float, max_new_tokens: int, seed: tuple[object, ...]
    ) -> list[str | None]:
        phase = parts.sample(tasks, n=1, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        return [group.rollouts[0].text if group.rollouts else None for group in phase.groups]

    seed = (cfg.seed, step, "pairs")
    return make_pairs(
        originals(groups), parts.reward_model.assistant, check, ask, tries=cfg.reward_model.tries, seed=seed
    )
