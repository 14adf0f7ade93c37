"""What the ranks of the period tests run: real updates of a real engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from spark_megatron.algos.advantages import ZScore
from spark_megatron.algos.kl import k3
from spark_megatron.algos.policy_loss import PPOClip
from spark_megatron.algos.unified import component_coefs, merged_coefs
from spark_megatron.config import RewardConfig
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.optim import OptimSettings
from spark_megatron.engine.parallel import Layout
from spark_megatron.hybrid.handoff import HandoffError
from spark_megatron.tracking.clock import Clock
from spark_megatron.trainers.period import advantage_samples, update
from spark_megatron.types import Group, Metrics, Sample
from tests import training_rows as step
from tests.engine.ranks_engine import layout

LAYOUTS = {"dp2": Layout(), "tp2": Layout(tensor=2), "pp2": Layout(pipeline=2)}


def on_all_layouts(path: Path, groups: list[Group]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, degrees in LAYOUTS.items():
        with layout(degrees) as parallel:
            settings = OptimSettings(**step.OPTIM)
            engine = Engine(path, parallel, torch.float32, settings, bucket_bytes=1 << 20, logits_bytes=1 << 20)
            answers[name] = periods(engine)
            if name == "dp2":
                answers["samples"] = signal(engine, groups)
    return answers


def sampled(engine: Engine) -> list[Sample]:
    """The policy-gradient rows, as if the engine's own weights had just drawn them: version and log-probs are its."""
    rows = [row for row in step.samples() if row.loss == "policy_gradient"]
    return [
        replace(row, rollout_logprobs=own_logprobs(engine, row), weight_version=engine.weight_version) for row in rows
    ]


def own_logprobs(engine: Engine, row: Sample) -> tuple[float, ...]:
    [batch] = step.batches_of([row], 1 << 20)
    [logprobs] = engine.logprobs([batch], step.TEMPERATURE)
    return tuple(logprobs[batch.trained].tolist())


def learn(
    engine: Engine, rows: Sequence[Sample], updates: int, token_weight: Any, reference: Any, kl: float
) -> Metrics:
    parts: Any = SimpleNamespace(
        engine=engine,
        rng=random.Random(0),
        policy_loss=PPOClip(clip_low=0.2, clip_high=0.2),
        kl_estimator=k3,
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    cfg: Any = SimpleNamespace(
        objective=SimpleNamespace(updates_per_period=updates),
        rollout=SimpleNamespace(temperature=step.TEMPERATURE),
        trainer=SimpleNamespace(max_tokens_per_microbatch=48),
    )
    return update(parts, cfg, rows, token_weight=token_weight, reference=reference, kl_coef=kl, span=Clock())


def periods(engine: Engine) -> dict[str, Any]:
    """One period each: the policy is its own reference; two updates; supervised rows too; nothing to learn from."""
    answers: dict[str, Any] = {}
    rows = sampled(engine)
    answers["first"] = learn(engine, rows, 1, merged_coefs, engine.snapshot(), step.KL_COEF)
    try:
        learn(engine, rows, 1, merged_coefs, None, 0.0)
        answers["stale"] = "accepted"
    except HandoffError as error:
        answers["stale"] = str(error)
    reference = engine.snapshot()
    answers["two"] = learn(engine, sampled(engine), 2, merged_coefs, reference, step.KL_COEF)
    answers["version"] = engine.weight_version
    supervised = [row for row in step.samples() if row.loss == "cross_entropy"]
    weights = partial(component_coefs, step.WEIGHTS)
    answers["joint"] = learn(engine, sampled(engine) + supervised, 1, weights, reference, step.KL_COEF)
    answers["without_reference"] = learn(engine, sampled(engine), 1, merged_coefs, None, 0.0)
    answers["nothing"] = learn(engine, [], 1, merged_coefs, reference, step.KL_COEF)
    return answers


def signal(engine: Engine, groups: list[Group]) -> list[tuple[str, tuple[int, ...], float]]:
    parts: Any = SimpleNamespace(engine=engine, advantage=ZScore(eps=0.0, unbiased=False, baseline="mean"))
    rewards = RewardConfig(unparsed=0.0, truncated=None, timeout=None, error=None)
    cfg: Any = SimpleNamespace(objective=SimpleNamespace(status_rewards=rewards))
    return [(s.component, s.response, s.advantage) for s in advantage_samples(parts, cfg, groups)]
