"""What the ranks of the period tests run: real updates of a real engine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from spark_megatron.algos.advantages import ZScore
from spark_megatron.algos.kl import k3
from spark_megatron.algos.mismatch import Correction, IcePop, SequenceMask, Truncated
from spark_megatron.algos.policy_loss import PPOClip
from spark_megatron.algos.unified import component_coefs, merged_coefs
from spark_megatron.config import RewardConfig
from spark_megatron.data.packing import kl_token_count, pack
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.optim import OptimSettings
from spark_megatron.engine.parallel import Layout
from spark_megatron.hybrid.handoff import HandoffError
from spark_megatron.tracking.clock import Clock
from spark_megatron.trainers.period import advantage_samples, update
from spark_megatron.types import Group, Metrics, Sample
from tests import training_rows as step
from tests.engine.ranks_engine import layout

LAYOUTS = {"dp2": Layout(), "tp2": Layout(tensor=2), "pp2": Layout(pipeline=2), "cp2": Layout(context=2)}
CORRECTED = ("dp2", "cp2")
"""Where ranks have different rows, and where they have parts of the same ones. Elsewhere ranks have the same."""

CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "truncated": Truncated(cap=2.0),
    "icepop": IcePop(low=0.5, high=5.0),
    "sequence_mask": SequenceMask(low=0.9, high=1.2),
}
RATIOS = (1.0, 0.25, 3.0, 1.1, 8.0)
"""Probabilities of the trainer over the sampler's, which the tokens of the corrected rows have in turn."""


def on_all_layouts(path: Path, groups: list[Group]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, degrees in LAYOUTS.items():
        with layout(degrees) as parallel:
            settings = OptimSettings(**step.OPTIM)
            engine = Engine(path, parallel, torch.float32, settings, bucket_bytes=1 << 20, logits_bytes=1 << 20)
            answers[name] = periods(engine)
            if name in CORRECTED:
                answers[name] |= {"corrected": corrected(engine), "aged": aged(engine)}
            if name == "dp2":
                answers["samples"] = signal(engine, groups)
    return answers


def sampled(engine: Engine) -> list[Sample]:
    """The policy-gradient rows, as if the engine's own weights had just drawn them: version and log-probs are its."""
    rows = [row for row in step.samples() if row.loss == "policy_gradient"]
    batch = pack(rows, step.WEIGHTS, kl_token_count(rows))  # all in one, other than the updates that follow
    [logprobs] = engine.logprobs([batch], step.TEMPERATURE)
    own = logprobs[batch.trained].split([len(row.response) for row in rows])
    version = engine.weight_version
    return [
        replace(row, rollout_logprobs=tuple(values.tolist()), weight_version=version)
        for row, values in zip(rows, own, strict=True)
    ]


def learn(
    engine: Engine,
    rows: Sequence[Sample],
    updates: int,
    token_weight: Any,
    reference: Any,
    kl: float,
    correction: Correction | None = None,
    max_staleness: int = 0,
) -> Metrics:
    parts: Any = SimpleNamespace(
        engine=engine,
        hybrid=SimpleNamespace(training=nullcontext),  # the engine has its device to itself
        rng=random.Random(0),
        policy_loss=PPOClip(clip_low=0.2, clip_high=0.2),
        correction=correction,
        kl_estimator=k3,
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    cfg: Any = SimpleNamespace(
        objective=SimpleNamespace(updates_per_period=updates, max_staleness=max_staleness),
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
    answers["two_without_reference"] = learn(engine, sampled(engine), 2, merged_coefs, None, 0.0)
    answers["nothing"] = learn(engine, [], 1, merged_coefs, reference, step.KL_COEF)
    return answers


def ratios_of(index: int, row: Sample) -> list[float]:
    """Every third row has hardly any mismatch, the others have the ratios in turn."""
    return [1.01 if index % 3 == 0 else RATIOS[(index + t) % len(RATIOS)] for t in range(len(row.response))]


def off(engine: Engine) -> list[Sample]:
    """The rows as a sampler would give them whose probabilities differ from the engine's by known ratios."""
    return [
        replace(
            row, rollout_logprobs=tuple(own - math.log(r) for own, r in zip(row.rollout_logprobs, ratios, strict=True))
        )
        for row, ratios in ((row, ratios_of(i, row)) for i, row in enumerate(sampled(engine)))
    ]


def corrected(engine: Engine) -> dict[str, Any]:
    """One period with each correction, one with two updates, one that lacks a log-prob."""
    answers: dict[str, Any] = {
        name: learn(engine, off(engine), 1, merged_coefs, None, 0.0, correction)
        for name, correction in CORRECTIONS.items()
    }
    answers["two"] = learn(engine, off(engine), 2, merged_coefs, None, 0.0, CORRECTIONS["icepop"])
    reference = engine.snapshot()
    answers["nothing"] = learn(engine, [], 2, merged_coefs, reference, step.KL_COEF, CORRECTIONS["truncated"])
    answers["unscored"] = learn(engine, unscored(engine), 1, merged_coefs, None, 0.0)
    try:
        learn(engine, unscored(engine), 1, merged_coefs, None, 0.0, CORRECTIONS["truncated"])
        answers["refusal"] = "accepted"
    except ValueError as error:
        answers["refusal"] = str(error)
    return answers


def unscored(engine: Engine) -> list[Sample]:
    """The rows from a sampler that gives no log-probs."""
    return [replace(row, rollout_logprobs=(math.nan,) * len(row.response)) for row in sampled(engine)]


def aged(engine: Engine) -> dict[str, Any]:
    """Half of the rows are two updates old and half are fresh; offered where that is allowed, and where it is not."""
    old = sampled(engine)
    for _ in range(2):
        learn(engine, sampled(engine), 1, merged_coefs, None, 0.0)
    rows = old[::2] + sampled(engine)[1::2]
    answers: dict[str, Any] = {"version": engine.weight_version}
    for allowed in (1, 2):
        try:
            answers[str(allowed)] = learn(engine, rows, 1, merged_coefs, None, 0.0, max_staleness=allowed)
        except HandoffError as error:
            answers[str(allowed)] = str(error)
    newer = [replace(row, weight_version=engine.weight_version + 1) for row in sampled(engine)]
    try:
        answers["newer"] = learn(engine, newer, 1, merged_coefs, None, 0.0, max_staleness=9)
    except HandoffError as error:
        answers["newer"] = str(error)
    return answers


def signal(engine: Engine, groups: list[Group]) -> list[tuple[str, tuple[int, ...], float]]:
    parts: Any = SimpleNamespace(engine=engine, advantage=ZScore(eps=0.0, unbiased=False, baseline="mean"))
    rewards = RewardConfig(unparsed=0.0, truncated=None, timeout=None, error=None)
    cfg: Any = SimpleNamespace(objective=SimpleNamespace(status_rewards=rewards))
    return [(s.component, s.response, s.advantage) for s in advantage_samples(parts, cfg, groups)]
