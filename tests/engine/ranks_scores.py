"""What the ranks of the tests of scalar heads run: every layout that fits the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spark_megatron.algos.preference_loss import comparison_loss
from spark_megatron.engine import checkpoint
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.parallel import Layout, Parallel
from spark_megatron.types import Comparison
from tests.engine.layouts import SCORE_LAYOUTS
from tests.engine.ranks_engine import SETTINGS, exported, gradients, layout
from tests.engine.score_rows import TEMPERATURE, batches_of, comparisons
from tests.training_rows import UPDATES

MAX_TOKENS = 64


def on_all_layouts(score_paths: dict[str, Path], out: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, (ranks, degrees, models) in SCORE_LAYOUTS.items():
        if ranks == dist.get_world_size():
            with layout(degrees) as parallel:
                for model in models:
                    engine = scorer(parallel, score_paths[model])
                    answers[f"{name}/{model}"] = training(engine, comparisons(), out / f"{name}_{model}")
    if dist.get_world_size() == 1:
        with layout(Layout()) as parallel:
            answers["seeds"] = [
                exported(scorer(parallel, score_paths["qwen2"], seed))["score.weight"] for seed in (0, 0, 1)
            ]
            answers["bf16"] = in_bf16(parallel, score_paths["qwen2"])
            answers["resumed"] = resumed(parallel, score_paths["qwen2"], out / "checkpoints")
    if dist.get_world_size() == 2:
        for name, degrees in (("dp2", Layout()), ("pp2_vp2", Layout(pipeline=2, virtual=2))):
            with layout(degrees) as parallel:
                answers[f"idle_{name}"] = training(scorer(parallel, score_paths["qwen2"]), comparisons(1), None)
    return answers


def scorer(parallel: Parallel, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Engine:
    return Engine(path, parallel, dtype, SETTINGS, bucket_bytes=60_000, logits_bytes=1 << 20, score_seed=seed)


def training(engine: Engine, rows: list[Comparison], out: Path | None) -> dict[str, Any]:
    parallel = engine.parallel
    batches = batches_of(rows, MAX_TOKENS, parallel.data, parallel.data_rank)
    if out is not None:
        engine.save_hf(out)
    answer: dict[str, Any] = {"batches": batches, "scores": engine.scores(batches), "stats": []}
    engine.accumulate(batches, comparison_loss, TEMPERATURE)
    answer["gradient"] = gradients(engine)
    for _ in range(UPDATES):
        answer["stats"].append(engine.update(batches, comparison_loss, TEMPERATURE))
    return answer | {"after": exported(engine), "version": engine.weight_version}


def in_bf16(parallel: Parallel, path: Path) -> dict[str, Any]:
    engine = scorer(parallel, path, dtype=torch.bfloat16)
    batches = batches_of(comparisons(), MAX_TOKENS)
    return {"scores": engine.scores(batches), "stats": engine.update(batches, comparison_loss, TEMPERATURE)}


def resumed(parallel: Parallel, path: Path, folder: Path) -> dict[str, bool]:
    """Whether an engine that loads a checkpoint goes on bit by bit as the one that saved it."""
    batches = batches_of(comparisons(), MAX_TOKENS)
    first, second = scorer(parallel, path), scorer(parallel, path, seed=3)
    first.update(batches, comparison_loss, TEMPERATURE)
    saves = checkpoint.Checkpoints(folder, keep=1, asynchronous=False)
    saves.save(first, 1, {})
    checkpoint.load(second, saves.latest() or folder)
    for engine in (first, second):
        engine.update(batches, comparison_loss, TEMPERATURE)
    other = second.snapshot()
    return {name: torch.equal(tensor, other[name]) for name, tensor in first.snapshot().items()}
