"""Saving and loading an engine through megatron-core's distributed checkpointing.

A checkpoint holds the weights, the optimizer, the place in the learning-rate schedule, the counters of the engine, the
random state of every rank and the caller's own state. Any parallel layout can load it.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from spark_megatron import runtime
from spark_megatron.engine import checkpoint_store as store
from spark_megatron.engine import checkpoint_write
from spark_megatron.engine.checkpoint_store import CheckpointError, read_state
from spark_megatron.engine.checkpoint_write import Writing, Written
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.modules import Decoder
from spark_megatron.engine.parallel import Parallel

__all__ = ["CheckpointError", "Checkpoints", "load", "load_weights", "read_state"]

T = TypeVar("T")

COUNTERS = ("weight_version", "skipped_updates")
"""Attributes of the engine that go on counting."""


class Checkpoints:
    """The checkpoints of one run, below one folder (see ``checkpoint_store`` for what is in it).

    Args:
        folder: where they are; made at the first save. All ranks must see the same one.
        keep: how many complete checkpoints stay.
        asynchronous: whether ``save`` returns before the files are written.
    """

    def __init__(self, folder: Path, *, keep: int, asynchronous: bool) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must stay")
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self._calls = AsyncCallsQueue(persistent=torch.cuda.is_available())

    def save(self, engine: Engine, step: int, state: dict[str, Any]) -> None:
        """Save the engine and ``state`` (anything that JSON can hold; rank 0's counts). A collective.

        Returns as soon as the weights may change again. A save that is still being written is waited for.

        Raises:
            CheckpointError: this save could not begin (or, if not asynchronous, end), or the one before it failed.
        """
        self.wait()
        with engine.optimizer_state():
            content = _tensors(engine, loading=False) | {"rng": _rng_object(_rng_state())}
            self._start(content, engine.parallel, step, _counters(engine), state)
        if not self.asynchronous:
            self.wait()

    def save_weights(self, chunks: Sequence[Decoder], parallel: Parallel, state: dict[str, Any]) -> None:
        """Save a model that is not trained here, as step 0: ``load_weights`` reads it, ``load`` does not. A collective.

        Raises:
            CheckpointError: it could not be written.
        """
        self._start(_models(chunks, parallel), parallel, 0, {}, state)
        self.wait()

    def _start(
        self, content: dict[str, Any], parallel: Parallel, step: int, counters: dict[str, Any], state: dict[str, Any]
    ) -> None:
        what = f"the checkpoint of step {step} in {self.folder}"
        plain = _together(lambda: store.state_content(counters, state), what)
        folder = _on_rank_zero(lambda: store.begin(self.folder, step), what)
        files = {
            store.STATE: plain,
            CONFIG_FNAME: json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode(),
            COMMON_STATE_FNAME: _empty(),  # megatron-core asks for it
        }
        sharded, _ = save_preprocess(content)
        mine = files if runtime.rank() == 0 else {}
        writing = checkpoint_write.plan(sharded, folder, mine, parallel.data_context_group)
        self._calls.schedule_async_request(writing.request(partial(self._finish, writing, step, what)))

    def _finish(self, writing: Writing, step: int, what: str) -> None:
        """What follows when all ranks have written. A collective."""
        answers = runtime.gather(writing.mailbox.take())
        try:
            _raise_first([a if isinstance(a, Exception) else None for a in answers], what)
            written = [a for a in answers if isinstance(a, Written)]
            _on_rank_zero(lambda: self._publish(writing, step, written), what)
        except CheckpointError:
            if runtime.rank() == 0:
                store.discard(writing.folder)
            raise

    def _publish(self, writing: Writing, step: int, written: list[Written]) -> None:
        writing.index(written)
        digests = {name: entry for each in written for name, entry in each.digests.items()}
        store.publish(writing.folder, step, digests | {store.INDEX: store.digest(writing.folder / store.INDEX)})
        store.prune(self.folder, self.keep)

    def poll(self) -> None:
        """Complete a save whose files are written; returns at once if they are not. A collective.

        Raises:
            CheckpointError: it failed; what it had written is removed, the checkpoints before it are as they were.
        """
        self._calls.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """As ``poll``, but waits for the writers. Call it before the process ends."""
        self._calls.maybe_finalize_async_calls(blocking=True)

    def latest(self) -> Path | None:
        """The checkpoint to resume from: the one completed last; None if there is none."""
        return store.latest(self.folder)


def load(engine: Engine, path: Path) -> None:
    """Put an engine into the state that was saved, whatever the layout it was saved from. A collective.

    The settings of the optimizer and of the schedule stay the engine's own; only the place in the schedule is loaded.
    The random state is set where the layout is the saved one.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
    """
    saved = _together(lambda: _verified(path), f"loading {path}")
    same_layout = saved["layout"] == _layout(engine)
    with engine.optimizer_state():
        wanted = _tensors(engine, loading=True) | ({"rng": _rng_object(None)} if same_layout else {})
        loaded = _read(wanted, path, str(engine.directory))
        _fill(engine.modules, loaded)
        for index, optimizer in _optimizers(engine).items():
            optimizer.load_parameter_state_from_fully_reshardable(loaded["optimizer"][index])
            for group in optimizer.param_groups:
                group["step"] = saved["updates"]
    engine.lr_schedule.num_steps = 0
    engine.lr_schedule.step(saved["updates"])
    for name in COUNTERS:
        setattr(engine, name, saved[name])
    if same_layout:
        _set_rng_state(loaded["rng"])


def load_weights(chunks: Sequence[Decoder], parallel: Parallel, path: Path) -> None:
    """Fill a model with the weights of a checkpoint, whatever the layout it was saved from. A collective.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
    """
    _together(lambda: store.verify(path, runtime.rank(), runtime.world_size()), f"loading {path}")
    _fill(chunks, _read(_models(chunks, parallel), path, "this model"))


def _read(wanted: dict[str, Any], path: Path, model: str) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(path))
    except (CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{path} does not fit {model}: {_cause(error)}") from error
    return loaded


def _fill(chunks: Sequence[Decoder], loaded: dict[str, Any]) -> None:
    for name, chunk in _named(chunks).items():
        chunk.load_state_dict(loaded[name])


def _verified(path: Path) -> dict[str, Any]:
    """The counters in a checkpoint, after this rank's share of the files was compared with the manifest."""
    store.verify(path, runtime.rank(), runtime.world_size())
    return store.read_counters(path)


def _together(action: Callable[[], T], what: str) -> T:
    """The result of ``action``; where it fails on one rank, all ranks raise the same CheckpointError. A collective."""
    result, problem = None, None
    try:
        result = action()
    except (OSError, TypeError, ValueError, CheckpointError) as error:
        problem = error
    _raise_first(runtime.gather(problem), what)
    return result  # type: ignore[return-value] # None only where action returned it


def _on_rank_zero(action: Callable[[], T], what: str) -> T:
    """The result of rank zero's ``action`` on every rank, or the same CheckpointError. A collective."""
    return runtime.broadcast_from_zero(_together(action if runtime.rank() == 0 else _nothing, what))


def _nothing() -> Any:
    return None


def _raise_first(errors: Sequence[Exception | None], what: str) -> None:
    for rank, error in enumerate(errors):
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"{what} failed on rank {rank}: {error}") from error


def _cause(error: BaseException) -> BaseException:
    """The first rank's error; torch's own message is the tracebacks of all ranks."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _layout(engine: Engine) -> dict[str, Any]:
    return asdict(engine.parallel.layout) | {"ranks": runtime.world_size()}


def _counters(engine: Engine) -> dict[str, Any]:
    """``updates`` is what both the optimizer and the schedule count."""
    counters = {name: getattr(engine, name) for name in COUNTERS}
    return counters | {"updates": engine.lr_schedule.num_steps, "layout": _layout(engine)}


def _named(chunks: Sequence[Decoder]) -> dict[str, Decoder]:
    """This rank's parts of the model under megatron-core's names for them."""
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _models(chunks: Sequence[Decoder], parallel: Parallel) -> dict[str, Any]:
    """megatron-core's description of this rank's weights."""
    metadata = _metadata(parallel)
    return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks).items()}


def _metadata(parallel: Parallel) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "dp_cp_group": parallel.data_context_group,
    }


def _optimizers(engine: Engine) -> dict[int, Any]:
    """megatron-core's optimizers on this rank: experts have their own, and a rank of frozen weights has none."""
    parts = enumerate(engine.optimizer.chained_optimizers)
    return {index: part for index, part in parts if not part.is_stub_optimizer and part.buffers}


def _tensors(engine: Engine, loading: bool) -> dict[str, Any]:
    """megatron-core's description of this rank's weights and optimizer state; when loading, of where they go."""
    models = _models(engine.modules, engine.parallel)
    states = {}
    for index, optimizer in _optimizers(engine).items():
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)  # there is none before the first update
        if optimizer.data_parallel_group.size() == 1:
            # megatron-core copies the state five times to gather it from the data ranks.
            optimizer.get_parameter_state_dp_zero = partial(_whole_state, optimizer)
        states[index] = optimizer.sharded_param_state_fully_reshardable(models, loading, _metadata(engine.parallel))
    return models | {"optimizer": states}


class _Parts(dict[int, Tensor]):
    """A buffer in parts, by the place where each begins."""

    def __getitem__(self, place: Any) -> Tensor:
        return super().__getitem__(place.start)


def _whole_state(optimizer: Any, **_how: Any) -> dict[Any, Any]:
    """What megatron-core's ``get_parameter_state_dp_zero`` gathers, where this rank has all of it already."""
    state: dict[Any, Any] = {}
    for index, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        parts: dict[str, _Parts] = {"param": _Parts(), "exp_avg": _Parts(), "exp_avg_sq": _Parts()}
        for parameter, (start, _, _) in buffer.param_index_map.items():
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            for name, part in parts.items():
                part[start] = tensors[name].detach()
        state[index] = dict.fromkeys(ranges, parts)
    return state


def _rng_object(state: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("rng", state, (runtime.world_size(),), (runtime.rank(),))


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _empty() -> bytes:
    stream = io.BytesIO()
    torch.save({}, stream)
    return stream.getvalue()
