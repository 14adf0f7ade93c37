"""Speed and memory of the training engine beside transformers, in one process on one machine.

    python tools/bench/engine.py [--model DIR] [--dtype bf16|fp32] [--tokens N] [--steps N] [--threads N]

Prints a table and, as the last line, one JSON object. Both sides train the same tokens with the same number of threads
and take turns, so that what else the machine does hurts both; ratios are medians over the rounds and mean the same on
any machine, absolute figures do not. ``models/smollm2_135m`` is made by ``python tools/import_smollm2.py``.

A model FLOP is one that the mathematics asks for, see ``model_flops``: neither padding nor recomputation counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spark_megatron import runtime

LONGEST = 256
"""Tokens of the longest sequence of the ragged batch; the shortest has an eighth of that."""
TRAINED = 0.5
"""Share of a sequence that is its response."""
MB = 1 << 20


def model_flops(hf: Any, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward over sequences of the given lengths.

    A weight of a matrix costs 2 FLOPs per token forwards and 4 backwards. Causal attention of a sequence of n tokens is
    two products of [n, head_dim] and half an [n, n] for each query head: 2 * n^2 * head_dim forwards, twice that
    backwards. The vocabulary is the real one, without padding; the input embedding is a look-up and costs nothing.
    """
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    attention = hf.hidden_size * head_dim * (2 * hf.num_attention_heads + 2 * hf.num_key_value_heads)
    mlp = 3 * hf.hidden_size * hf.intermediate_size
    weights = hf.num_hidden_layers * (attention + mlp) + hf.vocab_size * hf.hidden_size
    scores = hf.num_hidden_layers * hf.num_attention_heads * head_dim * sum(n * n for n in lengths)
    return 6.0 * weights * sum(lengths) + 6.0 * scores


def ragged_lengths(tokens: int, rng: random.Random) -> list[int]:
    """Lengths that add up to ``tokens``, evenly spread between an eighth of the longest and the longest."""
    lengths = [LONGEST]
    while (left := tokens - sum(lengths)) > LONGEST:
        lengths.append(min(rng.randint(LONGEST // 8, LONGEST), left - LONGEST // 8))
    return [*lengths, left]


def rows(lengths: Sequence[int], vocab: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the process's resident memory rises at most above where it stood while ``work`` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at what is resident now
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes, of a field of /proc/self/status: VmRSS is now, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Ours:
    """The engine, trained as the trainer ``sft`` does: packed sequences, cross-entropy on the responses."""

    def __init__(self, model: Path, dtype: str) -> None:
        from spark_megatron.engine.engine import Engine
        from spark_megatron.engine.model import DTYPES
        from spark_megatron.engine.optim import OptimSettings
        from spark_megatron.engine.parallel import Layout, Parallel

        settings = OptimSettings(
            lr=1e-5,
            min_lr=0.0,
            decay="constant",
            decay_updates=1000,
            wsd_updates=0,
            warmup_updates=0,
            weight_decay=0.0,
            betas=(0.9, 0.95),
            eps=1e-8,
            clip_grad=1.0,
            frozen=(),
            offload=False,
        )
        parallel = Parallel(Layout())
        sizes = {"bucket_bytes": 64 * MB, "logits_bytes": 256 * MB}
        self.engine = Engine(model, parallel, DTYPES[dtype], settings, **sizes)

    def step(self, batch: Any) -> None:
        from spark_megatron.algos.kl import k3
        from spark_megatron.algos.policy_loss import PPOClip
        from spark_megatron.algos.unified import token_loss

        policy = PPOClip(clip_low=0.2, clip_high=0.2)
        loss = partial(token_loss, policy_loss=policy, kl_coef=0.0, kl_estimator=k3)
        stats = self.engine.update([batch], loss, 1.0)
        assert not stats["skipped"]


def packed(sequences: Sequence[Sequence[int]]) -> Any:
    """The sequences as one micro-batch of supervised rows."""
    from spark_megatron.data.packing import pack
    from spark_megatron.types import Sample

    samples = []
    for tokens in sequences:
        cut = max(1, int(len(tokens) * (1 - TRAINED)))
        samples.append(Sample(tuple(tokens[:cut]), tuple(tokens[cut:]), "sft", "cross_entropy"))
    return pack(samples, {"sft": 1.0 / sum(len(s.response) for s in samples)}, 0)


class Theirs:
    """transformers' model and loss with torch's fused AdamW; batches are padded on the right to their longest row."""

    def __init__(self, model: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from spark_megatron.engine.model import DTYPES

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)

    def step(self, batch: dict[str, Any]) -> None:
        import torch

        self.optimizer.zero_grad()
        self.model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def padded(sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The sequences as transformers' collators make them of the same rows."""
    import torch

    shape = len(sequences), max(map(len, sequences))
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, tokens in enumerate(sequences):
        cut = max(1, int(len(tokens) * (1 - TRAINED)))
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, cut : len(tokens)] = torch.tensor(tokens[cut:])
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def matmul_peak(rounds: int) -> dict[str, float]:
    """FLOP/s of large matrix products, the best of some: in bf16, in fp32, and in bf16 the faster of both ways."""
    import torch

    size = 1024
    best = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(2, size, size).to(dtype)
        torch.mm(a, b)
        best[str(dtype).removeprefix("torch.")] = (
            2 * size**3 / min(seconds(lambda: torch.mm(a, b)) for _ in range(rounds))
        )
    return best


def training(ours: Ours, theirs: Theirs, hf: Any, args: argparse.Namespace) -> dict[str, float]:
    """Rounds of one step each of ours, theirs padded and theirs on full rows."""
    rng = random.Random(args.seed)
    ragged = ragged_lengths(args.tokens, rng)
    full = [LONGEST] * (args.tokens // LONGEST)
    sequences = rows(ragged, hf.vocab_size, rng)
    works = {
        "ours": partial(ours.step, packed(sequences)),
        "hf": partial(theirs.step, padded(sequences)),
        "hf_full": partial(theirs.step, padded(rows(full, hf.vocab_size, rng))),
    }
    for work in works.values():
        work()
    rounds = [
        {name: seconds(work) for name, work in works.items()} | {"peak": max(matmul_peak(3).values())}
        for _ in range(args.steps)
    ]

    def median(figure: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(figure, rounds))

    flops, tokens = model_flops(hf, ragged), sum(ragged)
    return {
        "sequences": len(ragged),
        "tokens": tokens,
        "fill": tokens / (len(ragged) * max(ragged)),
        "train_tokens_s": median(lambda r: tokens / r["ours"]),
        "hf_tokens_s": median(lambda r: tokens / r["hf"]),
        "hf_full_tokens_s": median(lambda r: sum(full) / r["hf_full"]),
        "train_vs_hf": median(lambda r: r["hf"] / r["ours"]),
        "train_vs_hf_full": median(lambda r: (tokens / r["ours"]) / (sum(full) / r["hf_full"])),
        "mfu": median(lambda r: flops / r["ours"] / r["peak"]),
        "mfu_hf": median(lambda r: flops / r["hf"] / r["peak"]),
        "mfu_vs_hf": median(lambda r: r["hf"] / r["ours"]),
    }
