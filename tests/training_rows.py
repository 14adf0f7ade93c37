"""A ragged step of every kind of row, as the trainers pack it, with its settings and an oracle for updating on it."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from spark_megatron.algos.kl import k3
from spark_megatron.algos.policy_loss import PPOClip
from spark_megatron.algos.unified import component_coefs, token_loss
from spark_megatron.data.packing import kl_token_count, lengths_of, pack, partition, token_counts
from spark_megatron.types import Batch, Sample
from tests.tiny_models import VOCAB

TEMPERATURE = 0.7
KL_COEF = 0.3
WEIGHTS = {"policy": 1.0, "pointwise": 0.4, "reflection": 0.2, "sft": 0.7}
UPDATES = 3
REFERENCE_SCALE = 0.98
"""The reference policy is the model with every parameter times this, so that the KL term matters from the start."""

OPTIM: dict[str, Any] = {
    "lr": 1e-4,
    "min_lr": 1e-5,
    "decay": "cosine",
    "decay_updates": 6,
    "warmup_updates": 0,
    "weight_decay": 0.1,
    "betas": (0.9, 0.95),
    # Large against rounding: AdamW's first step is lr * g / (|g| + eps), a sign function of noise where eps is tiny.
    "eps": 1e-4,
    "clip_grad": 1.0,
    "wsd_updates": 0,
    "frozen": (),
    "offload": False,
}

LOSS = partial(token_loss, policy_loss=PPOClip(clip_low=0.2, clip_high=0.2), kl_coef=KL_COEF, kl_estimator=k3)


def samples(count: int = 13) -> list[Sample]:
    """Rows of 4 to 30 tokens; every fourth one is supervised."""
    rng = random.Random(7)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high)))

    rows = []
    for i in range(count):
        prompt, response = tokens(3, 18), tokens(1, 12)
        if i % 4 == 3:
            rows.append(Sample(prompt, response, "sft", loss="cross_entropy"))
        else:
            component = ("policy", "pointwise", "reflection")[i % 3]
            logprobs = tuple(-5 * rng.random() for _ in response)
            rows.append(Sample(prompt, response, component, advantage=rng.gauss(0, 1), rollout_logprobs=logprobs))
    return rows


def batches_of(step: Sequence[Sample], max_tokens: int, ranks: int = 1, rank: int = 0) -> list[Batch]:
    """Micro-batches of one data rank's share of a step."""
    weights, kl_count = component_coefs(WEIGHTS, token_counts(step)), kl_token_count(step)
    plan = partition(lengths_of(step), max_tokens, ranks)
    return [pack([step[row] for row in rows], weights, kl_count) for rows in plan[rank]]


def model_logprobs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """[tokens]: log-probs of the labels and entropies through plain log-softmax, one sequence at a time."""
    pieces = batch.tokens.split(batch.cu_seqlens.diff().tolist())
    logits = torch.cat([model(piece[None]).logits[0] for piece in pieces])
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, batch.labels[:, None])[:, 0], entropy


def learning_rate(update: int) -> float:
    """The cosine schedule without warm-up at an update counted from 0."""
    share = update / OPTIM["decay_updates"]
    return float(OPTIM["min_lr"] + (OPTIM["lr"] - OPTIM["min_lr"]) * (1 + math.cos(math.pi * share)) / 2)


def hf_tensors(model: Any, values: Mapping[str, Tensor | None] | None = None) -> dict[str, Tensor]:
    """The tensors of a transformers model under the names of its files (its own differ for experts).

    ``values`` take the place of the parameters of these names for the moment.
    """
    parameters = dict(model.named_parameters())
    held = {name: p.data for name, p in parameters.items()}
    for name, value in (values or {}).items():
        parameters[name].data = torch.zeros_like(held[name]) if value is None else value
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    for name, p in parameters.items():
        p.data = held[name]
    return tensors


@dataclass(frozen=True)
class Oracle:
    """What transformers and torch's AdamW make of a step: statistics of each update, and HF tensors by name."""

    stats: list[dict[str, float]]
    gradient: dict[str, Tensor]
    """Before the first update, not clipped."""
    after: dict[str, Tensor]


def oracle(model: Any, step: Sequence[Sample], updates: int = UPDATES) -> Oracle:
    """``updates`` steps of torch's AdamW on a transformers model, all rows in one batch. Changes the model."""
    [batch] = batches_of(step, max_tokens=1 << 30)
    parameters = list(model.parameters())
    with torch.no_grad():
        batch.old_logprobs = model_logprobs(model, batch)[0]
        for parameter in parameters:
            parameter.mul_(REFERENCE_SCALE)
        batch.ref_logprobs = model_logprobs(model, batch)[0]
        for parameter in parameters:
            parameter.div_(REFERENCE_SCALE)
    gradient: dict[str, Tensor] = {}
    optimizer = torch.optim.AdamW(
        [
            # As megatron-core does it: norms and biases do not decay.
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIM["weight_decay"]},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=OPTIM["betas"],
        eps=OPTIM["eps"],
    )
    stats = []
    for update in range(updates):
        optimizer.zero_grad()
        loss, sums = LOSS(*model_logprobs(model, batch), batch)
        loss.backward()
        if update == 0:
            gradient = hf_tensors(model, {name: p.grad for name, p in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIM["clip_grad"])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update)
        optimizer.step()
        numbers = {key: float(value) for key, value in sums.items()}
        stats.append(numbers | {"grad_norm": float(norm), "lr": learning_rate(update)})
    return Oracle(stats, gradient, hf_tensors(model))
