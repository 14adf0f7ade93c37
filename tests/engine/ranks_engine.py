"""What the ranks of the engine tests run: every check on every parallel layout that fits the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file

from spark_megatron.engine import optim, platform
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.optim import OptimSettings
from spark_megatron.engine.parallel import Parallel
from spark_megatron.engine.weights import stream
from spark_megatron.engine.weights.stream import export_hf
from spark_megatron.types import Batch, Sample
from tests import training_rows as step

SETTINGS = OptimSettings(**step.OPTIM)
MAX_TOKENS = 96
LAYOUTS = {
    1: {"single": (1, 1)},
    2: {"tp2": (2, 1), "pp2": (1, 2), "dp2": (1, 1)},
    4: {"tp2_pp2": (2, 2), "tp2_dp2": (2, 1)},
}


def on_all_layouts(model_paths: dict[str, Path], out: Path, **single: Any) -> dict[str, Any]:
    """{layout: {model: {check: answer}}}, and the checks that need no parallelism under "once"."""
    answers: dict[str, Any] = {}
    for name, (tensor, pipeline) in LAYOUTS[dist.get_world_size()].items():
        with layout(tensor, pipeline) as parallel:
            answers[name] = {
                model: examine(engine_of(parallel, path), out / f"{name}_{model}")
                for model, path in model_paths.items()
            }
            some = next(iter(model_paths.values()))
            if name == "single":
                answers["once"] = once(parallel, model_paths, **single)
            if name == "tp2":
                with mock.patch.object(stream, "set_tensor_model_parallel_attributes"):
                    answers["unmarked"] = training(engine_of(parallel, some), updates=1)["stats"][0]
            if name == "dp2":
                answers["idle_rank"] = training(engine_of(parallel, some), step.samples(1), updates=1)
    return answers


@contextmanager
def layout(tensor: int, pipeline: int) -> Iterator[Parallel]:
    parallel = Parallel(tensor, pipeline)
    try:
        yield parallel
    finally:
        parallel_state.destroy_model_parallel()


def engine_of(parallel: Parallel, path: Path, dtype: torch.dtype = torch.float32) -> Engine:
    return Engine(path, parallel, dtype, SETTINGS, bucket_bytes=60_000)


def examine(engine: Engine, target: Path) -> dict[str, Any]:
    exports = weights(engine)
    engine.save_hf(target)
    return {"weights": exports, "saved": target, "training": training(engine)}


def weights(engine: Engine) -> list[dict[str, Any]]:
    """What was loaded, exported with several bucket sizes and compared bit by bit with the file."""
    reference = load_file(engine.directory / "model.safetensors")
    answers = []
    for limit in (1, 200_000, 1 << 40):
        names: list[str] = []
        sizes: list[int] = []
        wrong: list[str] = []
        for bucket in export_hf(engine.placement, limit):
            sizes.append(sum(tensor.numel() * tensor.element_size() for _, tensor in bucket))
            names += [name for name, _ in bucket]
            wrong += [name for name, tensor in bucket if not torch.equal(tensor, reference[name])]
        answers.append({"limit": limit, "names": names, "bytes": sizes, "wrong": wrong})
    return answers


def training(
    engine: Engine, rows: Sequence[Sample] | None = None, max_tokens: int = MAX_TOKENS, updates: int = step.UPDATES
) -> dict[str, Any]:
    """Some updates on this data rank's share of the rows: statistics, log-probs before, full weights after."""
    rows = step.samples() if rows is None else rows
    parallel = engine.parallel
    batches = step.batches_of(rows[parallel.data_rank :: parallel.layout.data], rows, max_tokens)
    before = engine.snapshot()
    old = engine.logprobs(batches, step.TEMPERATURE)
    again = engine.logprobs(batches, step.TEMPERATURE)
    with engine.holding({name: p * step.REFERENCE_SCALE for name, p in before.items()}):
        ref = engine.logprobs(batches, step.TEMPERATURE)
    for batch, old_logprobs, ref_logprobs in zip(batches, old, ref, strict=True):
        batch.old_logprobs, batch.ref_logprobs = old_logprobs, ref_logprobs
    stats = [engine.update(batches, step.LOSS, step.TEMPERATURE) for _ in range(updates)]
    with engine.holding(before):
        held = engine.logprobs(batches, step.TEMPERATURE)
    after = {name: tensor.clone() for bucket in engine.export() for name, tensor in bucket}
    return {
        "batches": batches,
        "repeats": all(map(torch.equal, old, again)),
        "held": all(map(torch.equal, old, held)),
        "moved": not all(map(torch.equal, old, engine.logprobs(batches, step.TEMPERATURE))),
        "version": engine.weight_version,
        "stats": stats,
        "after": after if dist.get_rank() == 0 else {},
    }


def once(parallel: Parallel, model_paths: dict[str, Path], broken: dict[str, Path], sharded: Path) -> dict[str, Any]:
    some = model_paths["qwen2"]
    return {
        "refusals": {name: refusal(parallel, path) for name, path in broken.items()},
        "sharded": weights_equal(parallel, sharded, model_paths["llama"]),
        "cuts": {
            cut: training(engine_of(parallel, some), max_tokens=cut, updates=1)["stats"][0] for cut in (1, 48, 1 << 20)
        },
        "bf16": bf16(parallel, some),
        "nan": nan_gradient(parallel, some),
        "learning_rates": learning_rates(),
        "platform": untouched_torch(),
    }


def refusal(parallel: Parallel, path: Path) -> str:
    try:
        engine_of(parallel, path)
    except ValueError as error:
        return str(error)
    return "accepted"


def weights_equal(parallel: Parallel, path: Path, other: Path) -> bool:
    first, second = ([b for bucket in engine_of(parallel, p).export() for b in bucket] for p in (path, other))
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(first, second, strict=True))


def bf16(parallel: Parallel, path: Path) -> dict[str, Any]:
    """One update in bf16: its loss, and the weights against the fp32 masters they must be rounded from."""
    rows = step.samples()
    engine = engine_of(parallel, path, torch.bfloat16)
    reference = load_file(path / "model.safetensors")
    loaded = [torch.equal(tensor, reference[name].bfloat16()) for bucket in engine.export() for name, tensor in bucket]
    batches = step.batches_of(rows, rows, MAX_TOKENS)
    for batch, logprobs in zip(batches, engine.logprobs(batches, step.TEMPERATURE), strict=True):
        batch.old_logprobs = batch.ref_logprobs = logprobs
    stats = engine.update(batches, step.LOSS, step.TEMPERATURE)
    return {"loaded": all(loaded), "stats": stats, "dtypes": {p.dtype for p in engine.ddp.parameters()}}


def nan_gradient(parallel: Parallel, path: Path) -> str:
    rows = step.samples()

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        return logprobs.sum() * float("nan"), {}

    try:
        engine_of(parallel, path).update(step.batches_of(rows, rows, MAX_TOKENS), loss, 1.0)
    except FloatingPointError as error:
        return str(error)
    return "accepted"


def learning_rates() -> dict[str, list[float]]:
    """The rate of the first updates under each decay, with two warm-up updates out of six."""

    def rates(decay: Any) -> list[float]:
        settings = OptimSettings(**{**step.OPTIM, "decay": decay, "warmup_updates": 2})
        group: dict[str, Any] = {}
        schedule = optim.lr_schedule(SimpleNamespace(param_groups=[group]), settings)
        found = []
        for _ in range(8):
            found.append(group["lr"])
            schedule.step(1)
        return found

    return {decay: rates(decay) for decay in ("constant", "linear", "cosine")}


def untouched_torch() -> dict[str, Any]:
    """What the rest of the process sees of torch once the CPU patches are in."""
    try:
        torch.zeros(1, device="cuda")
        zeros = "made"
    except (AssertionError, RuntimeError) as error:
        zeros = type(error).__name__
    layers = __import__("megatron.core.tensor_parallel.layers", fromlist=["torch"])
    return {
        "zeros": zeros,
        "current_device": torch.cuda.current_device.__module__,
        "in_megatron": str(layers.torch.cuda.current_device()),
        "type": torch.zeros(1).type(),
        "targets": [patch.target for patch in platform.PATCHES],
    }
