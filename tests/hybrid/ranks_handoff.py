"""What the ranks of the hand-off tests run: real training engines, real samplers, and planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from spark_megatron.engine.engine import Engine
from spark_megatron.engine.optim import OptimSettings
from spark_megatron.engine.parallel import Layout, Parallel
from spark_megatron.hybrid.handoff import HandoffError, Hybrid, Probe
from spark_megatron.rollout import weight_transfer
from spark_megatron.rollout.base import Request, Sampler
from tests import training_rows as step
from tests.engine.ranks_engine import layout
from tests.rollout.ranks_groups import byte_tokenizer, scripted
from tests.rollout.ranks_vllm import prompt, sampler

BOUND = 1e-3
PROBE = Probe(tuple(prompt(length, seed=length) for length in (6, 17, 30, 9)), new_tokens=6, bound=BOUND)
REQUESTS = [Request(prompt(length, seed=length), 2, 0.7, 8, seed=1000 * length) for length in (5, 20, 140)]
SETTINGS = OptimSettings(**step.OPTIM | {"lr": 5e-3})

Exported = Iterator[list[tuple[str, Tensor]]]


def on_all_layouts(models: dict[str, Path]) -> dict[str, Any]:
    """Trainer layout and sampler layout -> what was handed over and sampled; the faults under "faults"."""
    answers: dict[str, Any] = {}
    for model, path in models.items():
        single = sampler(path)
        with layout(Layout(tensor=2)) as parallel:
            engine = engine_of(path, parallel)
            answers[model, "tp2", 1] = updated(engine, single)
            if model == "qwen2":
                answers["faults"] = faults(engine, single)
                answers["without_model"] = without_model(engine)
        with layout(Layout(pipeline=2)) as parallel:
            engine = engine_of(path, parallel)
            answers[model, "pp2", 1] = updated(engine, single)
            single.close()
            if model == "qwen2":
                double = sampler(path, tensor_parallel=2)
                answers[model, "pp2", 2] = updated(engine, double)
                double.close()
    return answers


def engine_of(path: Path, parallel: Parallel) -> Engine:
    return Engine(path, parallel, torch.float32, SETTINGS, bucket_bytes=60_000, logits_bytes=60_000)


def learn(engine: Engine) -> None:
    rows, parallel = step.samples(), engine.parallel
    batches = step.batches_of(rows, 64, parallel.data, parallel.data_rank)
    for batch, logprobs in zip(batches, engine.logprobs(batches, step.TEMPERATURE), strict=True):
        batch.old_logprobs = batch.ref_logprobs = logprobs
    engine.update(batches, step.LOSS, step.TEMPERATURE)


def updated(engine: Engine, to: Sampler) -> dict[str, Any]:
    """Hand over, learn, hand over again; what is sampled then, and how often weights moved."""
    # The sampler may hold another engine's weights under the same number.
    to.weight_version = -1
    hybrid = Hybrid(engine, to, PROBE)
    with mock.patch.object(to, "start_update", wraps=to.start_update) as start:
        with hybrid.generating() as sampling:
            first = sampling.generate(REQUESTS)
        with hybrid.generating() as sampling:
            again = sampling.generate(REQUESTS)
        starts = [start.call_count]
        learn(engine)
        with hybrid.generating() as sampling:
            second = sampling.generate(REQUESTS)
        starts.append(start.call_count)
    return {
        "starts": starts,
        "repeats": [[r.tokens for r in g] for g in first] == [[r.tokens for r in g] for g in again],
        "versions": ({r.weight_version for g in first for r in g}, {r.weight_version for g in second for r in g}),
        "engine_version": engine.weight_version,
        "error": hybrid.last_error,
        "rollouts": list(zip(REQUESTS, second, strict=True)),
        "weights": {name: tensor.clone() for bucket in engine.export() for name, tensor in bucket},
        "replica": (to.replica, to.replicas),
    }


def swapped(export: Callable[[], Exported]) -> Exported:
    """Gate and up projection of one layer under each other's names."""
    layer = "model.layers.1.mlp."
    for bucket in export():
        names = {
            f"{layer}gate_proj.weight": f"{layer}up_proj.weight",
            f"{layer}up_proj.weight": f"{layer}gate_proj.weight",
        }
        yield [(names.get(name, name), tensor) for name, tensor in bucket]


def dropped(export: Callable[[], Exported]) -> Exported:
    """Without the bucket of one attention output."""
    for bucket in export():
        if not any(name == "model.layers.2.self_attn.o_proj.weight" for name, _ in bucket):
            yield bucket


def faults(engine: Engine, to: Sampler) -> dict[str, Any]:
    """Each fault on a hand-over of newly learned weights, then the same hand-over without it."""
    hybrid = Hybrid(engine, to, PROBE)
    export = engine.export
    plants: dict[str, Callable[[], Any]] = {
        "swapped": lambda: mock.patch.object(engine, "export", side_effect=partial(swapped, export)),
        "dropped": lambda: mock.patch.object(engine, "export", side_effect=partial(dropped, export)),
        "stale head": lambda: mock.patch.object(weight_transfer, "repack_tied_head"),
        "stale version": lambda: mock.patch.object(engine, "export", return_value=()),
    }
    answers = {}
    for name, plant in plants.items():
        learn(engine)
        message = "accepted"
        with ExitStack() as stack:
            stack.enter_context(plant())
            try:
                stack.enter_context(hybrid.generating())
            except HandoffError as error:
                message = str(error)
        found = hybrid.last_error
        hybrid.hand_over()
        answers[name] = {
            "message": message,
            "error": found,
            "version": engine.weight_version,
            "after": hybrid.last_error,
        }
    return answers


def without_model(engine: Engine) -> int:
    """How far the version of a sampler without a model is from the trainer's after a hand-over."""
    hybrid = Hybrid(engine, scripted(byte_tokenizer(), ["1"]), PROBE)
    with hybrid.generating() as sampling:
        return sampling.weight_version - engine.weight_version
