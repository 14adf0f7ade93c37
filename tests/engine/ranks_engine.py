"""What the ranks of the engine tests run: every check on every parallel layout that fits the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from safetensors.torch import load_file
from torch import Tensor

from spark_megatron.engine import optim, platform
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.optim import OptimSettings
from spark_megatron.engine.parallel import Layout, Parallel
from spark_megatron.engine.weights import placement
from spark_megatron.engine.weights.home import Position
from spark_megatron.engine.weights.stream import export_hf
from spark_megatron.types import Batch, Sample
from tests import training_rows as step
from tests.engine.layouts import LAYOUTS

SETTINGS = OptimSettings(**step.OPTIM)
MAX_TOKENS = 96
LOGITS_BYTES = 4 * 301 * 7
"""Seven tokens at a time on one rank."""


def on_all_layouts(model_paths: dict[str, Path], out: Path, **single: Any) -> dict[str, Any]:
    """{layout: {model: {check: answer}}}, and under "once" the checks that need but one layout of this job."""
    answers: dict[str, Any] = {}
    for name, (ranks, degrees, models) in LAYOUTS.items():
        if ranks == dist.get_world_size():
            with layout(degrees) as parallel:
                answers[name] = {m: examine(engine_of(parallel, model_paths[m]), out / f"{name}_{m}") for m in models}
                answers[f"position_{name}"] = place(parallel)
    if dist.get_world_size() == 1:
        with layout(Layout()) as parallel:
            answers["once"] = once(parallel, model_paths, **single)
    if dist.get_world_size() == 2:
        some = model_paths["llama3"]
        mark = "set_tensor_model_parallel_attributes"  # newer releases of megatron-core also call it by themselves
        with layout(Layout(tensor=2)) as parallel, mock.patch.object(placement, mark), mock.patch.object(layers, mark):
            answers["unmarked"] = training(engine_of(parallel, some), updates=1)["stats"][0]
        for name in ("dp2", "cp2", "pp2_vp2"):
            with layout(LAYOUTS[name][1]) as parallel:
                answers[f"idle_{name}"] = training(engine_of(parallel, some), step.samples(1), updates=1)
        with layout(Layout(expert=2)) as parallel:
            answers["idle_ep2"] = training(engine_of(parallel, model_paths["qwen3_moe"]), step.samples(1), updates=1)
        with layout(Layout(pipeline=2)) as parallel:
            answers["frozen_pp2"] = frozen(parallel, model_paths["qwen2"])
    return answers


@contextmanager
def layout(degrees: Layout) -> Iterator[Parallel]:
    parallel = Parallel(degrees)
    try:
        yield parallel
    finally:
        parallel_state.destroy_model_parallel()


def place(parallel: Parallel) -> Position:
    """This rank's place according to megatron-core's process groups."""
    return Position(
        parallel.tensor_rank, parallel.context_rank, parallel.data_rank, parallel.pipeline_rank, parallel.expert_rank
    )


def engine_of(
    parallel: Parallel, path: Path, dtype: torch.dtype = torch.float32, settings: OptimSettings = SETTINGS
) -> Engine:
    return Engine(path, parallel, dtype, settings, bucket_bytes=60_000, logits_bytes=LOGITS_BYTES)


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


def exported(engine: Engine) -> dict[str, Tensor]:
    """The full HF tensors, on rank 0 alone (the others take part)."""
    tensors = {name: tensor.clone() for bucket in engine.export() for name, tensor in bucket}
    return tensors if dist.get_rank() == 0 else {}


def gradients(engine: Engine) -> dict[str, Tensor]:
    """The whole gradient that the last ``accumulate`` left, as HF tensors, on rank 0.

    The distributed optimizer leaves each data rank the reduced gradient of its own share of the buffers.
    """
    for chunk in engine.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    held = engine.snapshot()
    names = [f"{i}.{name}" for i, chunk in enumerate(engine.chunks) for name, _ in chunk.module.named_parameters()]
    grads = [p.main_grad.clone() for chunk in engine.chunks for p in chunk.module.parameters()]
    with engine.holding(held | dict(zip(names, grads, strict=True))):
        return exported(engine)


def training(
    engine: Engine, rows: Sequence[Sample] | None = None, max_tokens: int = MAX_TOKENS, updates: int = step.UPDATES
) -> dict[str, Any]:
    """Some updates on this data rank's share of the rows: statistics, first log-probs and gradient, final weights."""
    rows = step.samples() if rows is None else rows
    parallel = engine.parallel
    batches = step.batches_of(rows, max_tokens, parallel.data, parallel.data_rank)
    before = engine.snapshot()
    old = engine.logprobs(batches, step.TEMPERATURE)
    again = engine.logprobs(batches, step.TEMPERATURE)
    with engine.holding({name: p * step.REFERENCE_SCALE for name, p in before.items()}):
        ref = engine.logprobs(batches, step.TEMPERATURE)
    for batch, old_logprobs, ref_logprobs in zip(batches, old, ref, strict=True):
        batch.old_logprobs, batch.ref_logprobs = old_logprobs, ref_logprobs
    engine.accumulate(batches, step.LOSS, step.TEMPERATURE)
    gradient = gradients(engine)
    stats = [engine.update(batches, step.LOSS, step.TEMPERATURE) for _ in range(updates)]
    with engine.holding(before):
        held = engine.logprobs(batches, step.TEMPERATURE)
    return {
        "batches": batches,
        "repeats": all(map(torch.equal, old, again)),
        "held": all(map(torch.equal, old, held)),
        "moved": not all(map(torch.equal, old, engine.logprobs(batches, step.TEMPERATURE))),
        "version": engine.weight_version,
        "stats": stats,
        "gradient": gradient,
        "after": exported(engine),
    }


def once(parallel: Parallel, model_paths: dict[str, Path], broken: dict[str, Path], sharded: Path) -> dict[str, Any]:
    some = model_paths["qwen2"]
    return {
        "refusals": {name: refusal(partial(engine_of, parallel, path)) for name, path in broken.items()},
        "sharded": weights_equal(parallel, sharded, model_paths["llama"]),
        "cuts": {
            cut: training(engine_of(parallel, some), max_tokens=cut, updates=1)["stats"][0] for cut in (1, 48, 1 << 20)
        },
        "bf16": bf16(parallel, some),
        "nan": not_finite(parallel, some),
        "outside": nan_outside(parallel, some),
        "frozen": frozen(parallel, some),
        "frozen_refusals": {
            pattern: refusal(partial(engine_of, parallel, some, settings=replace(SETTINGS, frozen=(pattern,))))
            for pattern in ("model.embd*", "*.q_proj.*")
        },
        "offload": offloaded(parallel, model_paths["qwen3"]),
        "learning_rates": learning_rates(),
        "platform": untouched_torch(),
    }


def refusal(make: Any) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return "accepted"


def weights_equal(parallel: Parallel, path: Path, other: Path) -> bool:
    first, second = (exported(engine_of(parallel, p)) for p in (path, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def ready(engine: Engine) -> list[Batch]:
    """All rows of a step, with the engine's own log-probs as those of policy and reference."""
    batches = step.batches_of(step.samples(), MAX_TOKENS)
    for batch, logprobs in zip(batches, engine.logprobs(batches, step.TEMPERATURE), strict=True):
        batch.old_logprobs = batch.ref_logprobs = logprobs
    return batches


def bf16(parallel: Parallel, path: Path) -> dict[str, Any]:
    """One update in bf16: its loss, and the weights against the file they must be rounded from."""
    engine = engine_of(parallel, path, torch.bfloat16)
    reference = load_file(path / "model.safetensors")
    loaded = all(torch.equal(tensor, reference[name].bfloat16()) for name, tensor in exported(engine).items())
    stats = engine.update(ready(engine), step.LOSS, step.TEMPERATURE)
    return {"loaded": loaded, "stats": stats, "dtypes": {p.dtype for p in engine.chunks[0].parameters()}}


def not_finite(parallel: Parallel, path: Path) -> dict[str, Any]:
    """An update with a NaN gradient and one with an infinite one, then a good one; and the good one alone."""

    def spoiled(by: float, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        return (logprobs * by).sum(), {}

    engine, other = engine_of(parallel, path), engine_of(parallel, path)
    batches, before = ready(engine), engine.snapshot()
    stats = [engine.update(batches, partial(spoiled, by), 1.0) for by in (float("nan"), 3e38)]
    untouched = all(torch.equal(p, before[name]) for name, p in engine.snapshot().items())
    version = engine.weight_version
    good = [e.update(batches, step.LOSS, step.TEMPERATURE) for e in (engine, other)]
    equal = all(torch.equal(p, other.snapshot()[name]) for name, p in engine.snapshot().items())
    return {
        "stats": stats,
        "untouched": untouched,
        "version": version,
        "counted": engine.skipped_updates,
        "goes_on": equal and good[0] == good[1],
    }


def nan_outside(parallel: Parallel, path: Path) -> bool:
    """Whether NaN at every position that is not trained leaves the update as it is, bit by bit."""
    engine, other = engine_of(parallel, path), engine_of(parallel, path)
    clean, spoiled = ready(engine), ready(engine)
    for batch in spoiled:
        for values in (batch.advantage, batch.old_logprobs, batch.ref_logprobs):
            assert values is not None
            values[~batch.trained] = float("nan")
    stats = [e.update(b, step.LOSS, step.TEMPERATURE) for e, b in ((engine, clean), (other, spoiled))]
    return stats[0] == stats[1] and all(torch.equal(p, other.snapshot()[n]) for n, p in engine.snapshot().items())


FROZEN = ("model.embed_tokens.weight", "model.layers.1.*")


def frozen(parallel: Parallel, path: Path) -> dict[str, Any]:
    """Which tensors two updates move with some of them frozen."""
    engine = engine_of(parallel, path, settings=replace(SETTINGS, frozen=FROZEN))
    before = exported(engine)
    batches = ready(engine)
    stats = [engine.update(batches, step.LOSS, step.TEMPERATURE) for _ in range(2)]
    after = exported(engine)
    return {"stats": stats, "moved": {name: not torch.equal(before[name], after[name]) for name in before}}


def offloaded(parallel: Parallel, path: Path) -> dict[str, Any]:
    """Two updates with the optimizer's state in host memory between them, against two without; fp32 and bf16."""
    answers = {}
    for dtype in (torch.float32, torch.bfloat16):
        engines = [engine_of(parallel, path, dtype, replace(SETTINGS, offload=offload)) for offload in (False, True)]
        for engine in engines:
            batches = ready(engine)
            for _ in range(2):
                engine.update(batches, step.LOSS, step.TEMPERATURE)
        first, second = (engine.snapshot() for engine in engines)
        answers[str(dtype)] = {
            "equal": all(torch.equal(first[name], second[name]) for name in first),
            "held": [state_bytes(engine) for engine in engines],
        }
    return answers


def state_bytes(engine: Engine) -> int:
    """Bytes of AdamW's moments in the memory of the device."""
    inner = [o.optimizer for o in engine.optimizer.chained_optimizers]
    tensors = [x for o in inner for state in o.state.values() for x in state.values() if torch.is_tensor(x) and x.dim()]
    return sum(x.untyped_storage().nbytes() for x in tensors)


def learning_rates() -> dict[str, list[float]]:
    """The rate of the first updates under each decay, with two warm-up updates out of six."""

    def rates(decay: Any) -> list[float]:
        settings = replace(SETTINGS, decay=decay, warmup_updates=2, wsd_updates=2 if decay == "wsd" else 0)
        group: dict[str, Any] = {}
        schedule = optim.lr_schedule(SimpleNamespace(param_groups=[group]), settings)
        found = []
        for _ in range(8):
            found.append(group["lr"])
            schedule.step(1)
        return found

    return {decay: rates(decay) for decay in ("constant", "linear", "cosine", "wsd")}


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
