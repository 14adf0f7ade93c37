"""The two halves of every period of reinforcement learning: sample and check, then update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from spark_megatron.algos import mismatch
from spark_megatron.algos.filters import is_flat
from spark_megatron.algos.mismatch import Correction
from spark_megatron.algos.unified import mean_stats, token_loss
from spark_megatron.config import Config
from spark_megatron.data.packing import (
    Plan,
    imbalance,
    kl_token_count,
    lengths_of,
    pack,
    partition,
    split_updates,
    token_counts,
)
from spark_megatron.data.samples import to_samples
from spark_megatron.engine import platform
from spark_megatron.engine.engine import Snapshot
from spark_megatron.hybrid.handoff import HandoffError
from spark_megatron.rewards.scoring import solved_shares, training_rewards
from spark_megatron.runtime import combine, gather
from spark_megatron.tracking.clock import Clock
from spark_megatron.trainers.parts import Parts
from spark_megatron.types import Batch, Component, Group, Metrics, Sample, Task, TaskKind

COMPONENT_OF: Mapping[TaskKind, Component] = {
    "solve": "policy",
    "judge_one": "pointwise",
    "judge_pair": "pairwise",
    "reflect": "reflection",
}

TokenWeight = Callable[[Mapping[Component, int]], Mapping[Component, float]]
"""From the global number of trained tokens per component to the weight of one token of each."""


def rollouts(parts: Parts, cfg: Config, tasks: Sequence[Task], seed: tuple[object, ...], span: Clock) -> list[Group]:
    """n checked rollouts of each task from the current weights; a task without room for a response is left out.

    Their verdicts are those that training learns from, with ``label_noise`` where a run has some.
    """
    with span("handoff"), parts.hybrid.generating():
        pass  # the device is the sampler's from here on
    with span("rollout"):
        phase = parts.sample(
            tasks,
            n=cfg.rollout.samples_per_task,
            temperature=cfg.rollout.temperature,
            max_new_tokens=cfg.rollout.max_new_tokens,
            seed=(cfg.seed, *seed),
        )
    parts.phases.append(phase)
    return parts.label_noise(phase.sampled, cfg.seed)


def solve_rollouts(parts: Parts, cfg: Config, step: int, span: Clock) -> list[Group]:
    """Rollouts of the step's tasks to solve, and of others on top where those taught nothing (``curriculum.resample``).

    The stream hears how often each task was solved.
    """
    table = cfg.objective.status_rewards.table()
    groups: list[Group] = []
    wanted, drawn = cfg.trainer.tasks_per_step, 0
    while wanted:
        seed = (step, "solve", drawn) if drawn else (step, "solve")
        new = rollouts(parts, cfg, parts.stream.take(wanted), seed, span)
        parts.stream.observe(solved_shares(new))
        groups += new
        drawn += wanted
        flat = sum(is_flat(training_rewards(group, table)) for group in new)
        spent = drawn - cfg.trainer.tasks_per_step
        wanted = parts.resample.more(flat, spent) if parts.resample is not None else 0
    return groups


def advantage_samples(parts: Parts, cfg: Config, groups: Sequence[Group]) -> list[Sample]:
    """The rollouts that carry a signal, with their group-relative advantages."""
    table = cfg.objective.status_rewards.table()
    advantages = [parts.advantage(training_rewards(group, table)) for group in groups]
    return to_samples(groups, advantages, COMPONENT_OF)


def update(
    parts: Parts,
    cfg: Config,
    samples: Sequence[Sample],
    *,
    token_weight: TokenWeight,
    reference: Snapshot | None,
    kl_coef: float,
    span: Clock,
) -> Metrics:
    """Learn from ``samples`` (the same list on every rank) in ``objective.updates_per_period`` optimiser steps.

    Log-probs of the policy before the first step, and of the reference, are computed once; where nothing is corrected,
    the first step's own forward pass serves for the former. "imbalance" is the busiest data rank's share of tokens over
    the mean. Names with an "@" are sums for :func:`spark_megatron.algos.mismatch.figures`.

    Raises:
        HandoffError: a sample was drawn with weights newer than the trainer's or older than
            ``objective.max_staleness`` allows.
    """
    version = parts.engine.weight_version
    drawn = {s.weight_version for s in samples if s.loss == "policy_gradient"}
    _refuse_stale(drawn, version, cfg.objective.max_staleness)
    shares = split_updates(samples, cfg.objective.updates_per_period, parts.rng)
    limit, ranks = cfg.trainer.max_tokens_per_microbatch, parts.engine.parallel.data
    plans = [partition(lengths_of(share), limit, ranks) for share in shares]
    updates = [_local_batches(parts, share, plan, token_weight) for share, plan in zip(shares, plans, strict=True)]
    loss = partial(token_loss, policy_loss=parts.policy_loss, kl_coef=kl_coef, kl_estimator=parts.kl_estimator)
    with span("handoff"), parts.hybrid.training():
        pass  # the device is the trainer's from here on
    weighed: Metrics = {}
    if drawn or reference is not None:
        with span("logprobs"):
            _add_logprobs(parts, cfg, updates, reference)
            if parts.correction is not None:
                weighed = _correct(parts, updates, parts.correction)
    with span("update"):
        stats = [parts.engine.update(batches, loss, cfg.rollout.temperature) for batches in updates]
    uneven = max(imbalance(lengths_of(share), plan) for share, plan in zip(shares, plans, strict=True))
    return _summary(stats) | mismatch.by_age(combine([*stats, weighed]), version) | {"imbalance": uneven}


def _refuse_stale(drawn: set[int], version: int, oldest: int) -> None:
    stale = drawn - set(range(max(0, version - oldest), version + 1))
    if stale:
        raise HandoffError(
            f"rollouts of weights {sorted(stale)} were offered to weights {version}, and at most "
            f"objective.max_staleness={oldest} updates may lie between: sample again, or raise it"
        )


def _summary(stats: Sequence[Mapping[str, float]]) -> Metrics:
    """One period's numbers from those of its optimiser steps; a mean over no token is left out.

    "first_kl" and "first_ratio" are those of the first step alone, whose weights are still the sampling ones.
    """
    first, total = mean_stats(stats[0]), mean_stats(combine(stats))
    names = {"kl": "kl", "entropy": "entropy", "cross_entropy": "cross_entropy"}
    names |= {"ratio": "ratio_mean", "clipped": "clip_frac"}
    return {
        "loss": total["loss"] / len(stats),
        "grad_norm": sum(s["grad_norm"] for s in stats) / len(stats),
        "lr": stats[-1]["lr"],
        "tokens": total["tokens"],
        "skipped": total["skipped"],
        **{name: total[key] for key, name in names.items() if key in total},
        **{f"first_{key}": first[key] for key in ("kl", "ratio") if key in first},
    }


def _local_batches(parts: Parts, samples: Sequence[Sample], plan: Plan, token_weight: TokenWeight) -> list[Batch]:
    """This data rank's micro-batches of one optimiser step. Weights come from the whole step: all ranks know it."""
    weights, kl_count = token_weight(token_counts(samples)), kl_token_count(samples)
    mine = plan[parts.engine.parallel.data_rank]
    return [pack([samples[row] for row in rows], weights, kl_count).to(platform.device()) for rows in mine]


def _add_logprobs(parts: Parts, cfg: Config, updates: Sequence[list[Batch]], reference: Snapshot | None) -> None:
    """The reference's log-probs for all updates, and the policy's own: for the first only where they are corrected."""
    own = [batch for batches in (updates[1:] if parts.correction is None else updates) for batch in batches]
    if own:
        for batch, old in zip(own, parts.engine.logprobs(own, cfg.rollout.temperature), strict=True):
            batch.old_logprobs = old
    if reference is None:
        return
    everything = [batch for batches in updates for batch in batches]
    with parts.engine.holding(reference):
        for batch, ref in zip(everything, parts.engine.logprobs(everything, cfg.rollout.temperature), strict=True):
            batch.ref_logprobs = ref


def _correct(parts: Parts, updates: Sequence[list[Batch]], correction: Correction) -> Metrics:
    """Weigh the sampled tokens of all micro-batches; the sums of what that did, over all data ranks. A collective."""
    done = [mismatch.correct(batch, correction) for batches in updates for batch in batches]
    mine = combine({key: float(value) for key, value in sums.items()} for sums in done)
    # Ranks that share their micro-batches have the same sums: those of one of them count.
    return combine(dict(gather((parts.engine.parallel.data_rank, mine))).values())
