"""A ragged step of pairs and labels, and what transformers and torch's AdamW make of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from spark_megatron.algos.preference_loss import comparison_loss
from spark_megatron.data.comparisons import comparison_lengths, pack_comparisons, term_weights
from spark_megatron.data.packing import partition
from spark_megatron.types import Comparison, Comparisons
from tests.tiny_models import CONFIGS, VOCAB
from tests.training_rows import OPTIM, UPDATES, Oracle, hf_tensors, learning_rate

ANCHOR = 0.3
TEMPERATURE = 0.8


def comparisons(count: int = 9) -> list[Comparison]:
    """Sequences of 1 to 30 tokens: pairs, but every third is a label, right and wrong in turn."""
    rng = random.Random(11)

    def text() -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30)))

    rows = [Comparison(text(), text()) for _ in range(count)]
    for i in range(2, count, 3):
        rows[i] = Comparison(rows[i].right, ()) if i % 2 else Comparison((), rows[i].wrong)
    return rows


def batches_of(rows: list[Comparison], max_tokens: int, ranks: int = 1, rank: int = 0) -> list[Comparisons]:
    weights, plan = term_weights(rows, ANCHOR), partition(comparison_lengths(rows), max_tokens, ranks)
    return [pack_comparisons([rows[row] for row in part], weights) for part in plan[rank]]


def save_classifier(name: str, directory: Path) -> None:
    """A directory of transformers' classifier with one label; weights large enough to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = CONFIGS[name].__class__(**{**CONFIGS[name].to_dict(), "num_labels": 1})
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1) if parameter.ndim == 1 else parameter.mul_(4)
    model.save_pretrained(directory)


def load_classifier(directory: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()


def model_scores(model: Any, batch: Comparisons) -> Tensor:
    """[sequences], one sequence at a time."""
    pieces = batch.tokens.split(batch.cu_seqlens.diff().tolist())
    return torch.stack([model(piece[None]).logits[0, 0] for piece in pieces])


def oracle(model: Any, rows: list[Comparison], updates: int = UPDATES) -> Oracle:
    """``updates`` steps of torch's AdamW, all rows in one batch. Changes the model."""
    [batch] = batches_of(rows, max_tokens=1 << 30)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIM["weight_decay"]},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=OPTIM["betas"], eps=OPTIM["eps"])
    gradient: dict[str, Tensor] = {}
    stats = []
    for update in range(updates):
        optimizer.zero_grad()
        loss, sums = comparison_loss(model_scores(model, batch) / TEMPERATURE, batch)
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
