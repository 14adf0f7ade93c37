"""What the ranks of the checkpoint tests run: training that is saved, loaded elsewhere, and goes on."""

from __future__ import annotations

import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file
from torch import Tensor

from spark_megatron.engine import checkpoint_write
from spark_megatron.engine.checkpoint import CheckpointError, Checkpoints, load, read_state
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.parallel import Layout
from spark_megatron.types import Batch
from tests import training_rows as step
from tests.engine.ranks_engine import MAX_TOKENS, SETTINGS, engine_of, layout

STATE = {"step": 2, "note": "the caller's ünïcode", "cursor": [1, 2.5, None, {"seen": True}]}

CASES: dict[str, tuple[str, Layout, torch.dtype]] = {
    "tp2": ("qwen2", Layout(tensor=2), torch.float32),
    "pp2": ("qwen2", Layout(pipeline=2), torch.float32),
    "pp2_vp2": ("qwen2", Layout(pipeline=2, virtual=2), torch.float32),
    "dp2": ("qwen2", Layout(), torch.float32),
    "cp2": ("qwen2", Layout(context=2), torch.float32),
    "tp2_sp_bf16": ("qwen3", Layout(tensor=2, sequence=True), torch.bfloat16),
    "ep2": ("qwen3_moe", Layout(expert=2), torch.float32),
}
"""Name -> (model, layout, dtype), on two ranks."""

CROSSINGS = [("tp2", "pp2_vp2"), ("pp2", "dp2"), ("dp2", "pp2"), ("dp2", "tp2"), ("pp2_vp2", "cp2"), ("cp2", "tp2")]
"""Saved by the first, loaded by the second; all from one model."""

FREE = [0, 6_000, 30_000, 1_000_000, 7_000_000]
"""Bytes left on a disk, none of which are enough for a checkpoint."""


def learn(engine: Engine, updates: int = 2) -> list[dict[str, float]]:
    """Updates on the rows of a step; what the loss compares with comes from the weights as they are."""
    parallel = engine.parallel
    batches = step.batches_of(step.samples(), MAX_TOKENS, parallel.data, parallel.data_rank)
    for batch, logprobs in zip(batches, engine.logprobs(batches, step.TEMPERATURE), strict=True):
        batch.old_logprobs = batch.ref_logprobs = logprobs
    return [engine.update(batches, step.LOSS, step.TEMPERATURE) for _ in range(updates)]


def broken_update(engine: Engine) -> None:
    """One whose gradient is not a number, so that it is skipped."""

    def loss(logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs.sum() * float("nan"), {}

    engine.update(step.batches_of(step.samples(2), MAX_TOKENS), loss, step.TEMPERATURE)


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.export() for name, tensor in bucket}


def draw() -> list[float]:
    """One random number of every kind."""
    tracker = get_cuda_rng_tracker()
    states = [float(state.float().sum()) for state in tracker.get_states().values()]
    return [random.random(), float(numpy.random.rand()), float(torch.rand(())), *states]


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
    get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.full([8], number, dtype=torch.uint8)})


def counters(engine: Engine) -> dict[str, Any]:
    return {
        "version": engine.weight_version,
        "skipped": engine.skipped_updates,
        "lr": [group["lr"] for group in engine.optimizer.param_groups],
        "scheduled": engine.lr_schedule.num_steps,
    }


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of two weights."""
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def on_two_ranks(model_paths: dict[str, Path], target: Path, small_disk: Path) -> dict[str, Any]:
    """{case: answers}, {(from, to): answers}, and single checks under their names."""
    answers: dict[str, Any] = {}
    for name, (model, degrees, dtype) in CASES.items():
        with layout(degrees) as parallel:
            answers[name] = interrupted(partial(engine_of, parallel, model_paths[model], dtype), target / name)
    for saved, loaded in CROSSINGS:
        with layout(CASES[loaded][1]) as parallel:
            answers[saved, loaded] = crossed(engine_of(parallel, model_paths["qwen2"]), target / saved)
    with layout(Layout(tensor=2)) as parallel:
        engine = engine_of(parallel, model_paths["qwen2"])
        answers["damage"] = damage(engine, target / "tp2", target / "damaged")
        other = engine_of(parallel, model_paths["qwen3"])
        answers["other model"] = refusal(lambda: load(other, saved_in(target / "tp2")))
        answers["timing"] = timing(engine, target / "timing")
        answers["dead writer"] = dead_writer(engine, target / "dead_writer")
        answers["full disk"] = full_disk(engine, small_disk)
        no_json = Checkpoints(target / "no_json", keep=1, asynchronous=True)
        answers["no json"] = refusal(lambda: no_json.save(engine, 1, {"bad": {1, 2}}))
    with layout(Layout(pipeline=2)) as parallel:
        build = partial(engine_of, parallel, model_paths["qwen2"])
        # All of the first stage, and a layer of the second.
        frozen = replace(SETTINGS, frozen=("model.embed_tokens.weight", *(f"model.layers.{i}.*" for i in range(3))))
        answers["frozen"] = interrupted(
            partial(engine_of, parallel, model_paths["qwen2_untied"], settings=frozen), target / "frozen"
        )
        offload = replace(SETTINGS, offload=True)
        answers["offload"] = interrupted(partial(build, torch.bfloat16, offload), target / "offload")
        answers["untrained"] = untrained(build, target / "untrained")
        changed = replace(SETTINGS, lr=3e-4, min_lr=3e-4, weight_decay=0.3, decay="constant")
        answers["new settings"] = new_settings(build(settings=changed), saved_in(target / "pp2"))
    return answers


def saved_in(folder: Path) -> Path:
    path = Checkpoints(folder, keep=1, asynchronous=False).latest()
    assert path is not None
    return path


def interrupted(build: Callable[[], Engine], folder: Path) -> dict[str, Any]:
    """Four updates with a save after two, and two more from what was saved, in an engine that never trained."""
    engine, rank = build(), dist.get_rank()
    learn(engine)
    broken_update(engine)
    seed(100 + rank)
    draw()
    checkpoints = Checkpoints(folder, keep=1, asynchronous=True)
    checkpoints.save(engine, 2, STATE)
    at_save, drawn, counted = weights(engine), draw(), counters(engine)
    stats = learn(engine)
    checkpoints.wait()
    after, finally_counted = weights(engine), counters(engine)
    if rank == 0:
        save_file(at_save, folder / "at_save.safetensors")
        save_file(after, folder / "after.safetensors")

    resumed, path = build(), saved_in(folder)
    seed(7)
    learn(resumed, 1)  # the engine need not be new
    load(resumed, path)
    answers = {
        "loaded": equal(weights(resumed), at_save),
        "moved": not equal(at_save, after),
        "draws": draw() == drawn,
        "counters": counters(resumed) == counted,
        "counted": counted,
        "state": read_state(path) == STATE,
        "stats": learn(resumed) == stats,
        "after": equal(weights(resumed), after),
        "finally": counters(resumed) == finally_counted,
        "files": sorted(file.name for file in path.iterdir()),
        "name": path.name,
    }
    load(resumed, path)
    return answers | {"again": equal(weights(resumed), at_save) and counters(resumed) == counted}


def crossed(engine: Engine, folder: Path) -> dict[str, Any]:
    """Two updates from what another layout saved, against those that it made itself."""
    seed(7)
    mine = draw()
    seed(7)
    load(engine, saved_in(folder))
    loaded, random_numbers = weights(engine), draw()
    learn(engine)
    return {
        "loaded": equal(loaded, load_file(folder / "at_save.safetensors")),
        "draws": random_numbers == mine,
        "distance": distance(weights(engine), load_file(folder / "after.safetensors")),
        "version": engine.weight_version,
    }


def on_one_rank(model_paths: dict[str, Path], target: Path) -> dict[str, Any]:
    """What two ranks saved, loaded by one."""
    answers = {}
    for name, (model, _, dtype) in CASES.items():
        with layout(Layout()) as parallel:
            answers[name] = crossed(engine_of(parallel, model_paths[model], dtype), target / name)
    return answers


def untrained(build: Callable[[], Engine], folder: Path) -> bool:
    """Whether saving before the first update changes nothing, here or after a load."""
    plain, saved, resumed = build(), build(), build()
    checkpoints = Checkpoints(folder, keep=1, asynchronous=False)
    checkpoints.save(saved, 0, {})
    load(resumed, saved_in(folder))
    for engine in (plain, saved, resumed):
        learn(engine)
    return equal(weights(plain), weights(saved)) and equal(weights(plain), weights(resumed))


def new_settings(engine: Engine, path: Path) -> dict[str, Any]:
    load(engine, path)
    groups = [{key: group[key] for key in ("lr", "weight_decay", "step")} for group in engine.optimizer.param_groups]
    return {"groups": groups, "stats": learn(engine, 1)}


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "accepted"


def damage(engine: Engine, good: Path, root: Path) -> dict[tuple[str, str], str]:
    """What loading says of copies of a checkpoint in which one file each is not what was written."""
    path = saved_in(good)
    answers = {}
    for kind, file in product(("flipped", "short", "missing"), sorted(file.name for file in path.iterdir())):
        copy = root / f"{kind}_{file}"
        if dist.get_rank() == 0:
            shutil.copytree(path, copy)
            content = bytearray((copy / file).read_bytes())
            content[len(content) // 2] ^= 1
            if kind == "short":
                del content[-1]
            (copy / file).unlink()
            if kind != "missing":
                (copy / file).write_bytes(content)
        dist.barrier()
        answers[kind, file] = refusal(lambda copy=copy: load(engine, copy))
    return answers


def timing(engine: Engine, folder: Path) -> dict[str, Any]:
    """When a checkpoint becomes the latest one, with a writer that waits for a file."""
    checkpoints, go = Checkpoints(folder, keep=5, asynchronous=True), folder.with_name("go")
    real = checkpoint_write._write_items

    def slow(file: Path, items: list[Any]) -> list[Any]:
        while not go.exists():
            time.sleep(0.01)
        return real(file, items)

    before = weights(engine)
    with mock.patch.object(checkpoint_write, "_write_items", slow):
        checkpoints.save(engine, 1, {})
    learn(engine, 1)
    checkpoints.poll()
    seen = {"while it is written": checkpoints.latest()}
    dist.barrier()
    go.touch()
    checkpoints.wait()
    seen["written"] = checkpoints.latest()
    load(engine, folder / "step_00000001")
    captured = equal(weights(engine), before)
    checkpoints.save(engine, 3, {})
    checkpoints.save(engine, 2, {})
    seen["while the next is written"] = checkpoints.latest()
    while checkpoints.latest() != folder / "step_00000002":
        checkpoints.poll()
        dist.barrier()
    at_once = Checkpoints(folder, keep=2, asynchronous=False)
    at_once.save(engine, 4, {})
    seen["at once"] = checkpoints.latest()
    names = {when: path.name if path else None for when, path in seen.items()}
    return {"seen": names, "captured": captured, "listed": sorted(path.name for path in folder.iterdir())}


def dead_writer(engine: Engine, folder: Path) -> dict[str, Any]:
    """A writing process that ends without an answer."""
    checkpoints = Checkpoints(folder, keep=1, asynchronous=True)
    checkpoints.save(engine, 1, {})
    checkpoints.wait()
    with mock.patch.object(checkpoint_write, "_write_items", side_effect=SystemExit(9)):
        checkpoints.save(engine, 2, {})
    message = refusal(checkpoints.wait)
    dist.barrier()
    listed = sorted(path.name for path in folder.iterdir())
    checkpoints.save(engine, 3, {})
    checkpoints.wait()
    return {"message": message, "listed": listed, "next": saved_in(folder).name}


@contextmanager
def left_on_disk(folder: Path, size: int) -> Iterator[None]:
    """With ``size`` bytes left; where the folder is no disk of its own, with a limit to each file instead."""
    filler, rank = folder / "filler", dist.get_rank()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not folder.is_mount():
        resource.setrlimit(resource.RLIMIT_FSIZE, (min(max(size, 4_096), 1_000_000), hard))
    elif rank == 0:
        filler.write_bytes(bytes(shutil.disk_usage(folder).free - size))
    dist.barrier()
    yield
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if rank == 0:
        filler.unlink(missing_ok=True)
    dist.barrier()


def full_disk(engine: Engine, folder: Path) -> dict[str, Any]:
    """Saves with too few bytes left on the disk: what is said, and what is left of the checkpoint before."""
    Checkpoints(folder / "saved", keep=1, asynchronous=False).save(engine, 1, {})
    before, answers = weights(engine), {}
    for size, asynchronous in product(FREE, (False, True)):
        failing = Checkpoints(folder / "saved", keep=1, asynchronous=asynchronous)
        with left_on_disk(folder, size):
            learn(engine, 1)
            message = refusal(lambda failing=failing: (failing.save(engine, 2, {}), failing.wait()))
        listed = sorted(path.name for path in (folder / "saved").iterdir())
        load(engine, saved_in(folder / "saved"))
        answers[size, asynchronous] = {"message": message, "listed": listed, "kept": equal(weights(engine), before)}
    Checkpoints(folder / "saved", keep=1, asynchronous=False).save(engine, 2, {})
    return {"failures": answers, "next": saved_in(folder / "saved").name}
