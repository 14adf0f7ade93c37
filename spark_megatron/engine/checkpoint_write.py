"""How a checkpoint's files come to be written: planned by all ranks, written by a process of each, beside the training.

On a CPU that process is a fork of the training process, which sees the memory as it was at that moment: nothing is
copied, and training may go on at once. On a GPU it is a process that stays, to which the tensors are copied before
``start`` returns. It opens files and computes checksums; it takes no part in collectives.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from spark_megatron.engine import checkpoint_store as store

Item = tuple[WriteItem, Tensor | io.BytesIO]


@dataclass(frozen=True)
class Written:
    """What one rank wrote: where each tensor lies, for the index of the checkpoint, and a digest per file."""

    results: list[WriteResult]
    digests: dict[str, dict[str, Any]]


class Mailbox:
    """Where the writing process leaves its answer: memory of the training process, since the disk may be full."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        self.file = Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")

    def put(self, answer: Written | Exception) -> None:
        self.file.write_bytes(pickle.dumps(answer))

    def take(self) -> Written | Exception:
        """The answer, or an error that says that there is none. Once."""
        content = self.file.read_bytes()
        os.close(self.descriptor)
        return pickle.loads(content) if content else ChildProcessError("its writing process died; is memory short?")


class _Planned(FileSystemWriter):
    """torch's writer, up to the point where it would write."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Called by megatron-core with what falls to this rank."""
        self.name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        self.items: list[Item] = [(item, planner.resolve_data(item)) for item in plan.items]


@dataclass
class Writing:
    """A save that is planned or on its way."""

    folder: Path
    others: dict[str, bytes]
    """Further files of this rank."""
    mailbox: Mailbox
    _planned: _Planned
    _metadata: Any

    def request(self, finish: Callable[[], None]) -> AsyncRequest:
        """For megatron-core's queue; ``finish`` is called on all ranks when all have written."""
        items = self._planned.items
        stage = partial(_on_host, items) if torch.cuda.is_available() else None
        arguments = (self.folder / self._planned.name, items, self.others, self.mailbox)
        return AsyncRequest(_write, arguments, [finish], preload_fn=stage)

    def index(self, written: Iterable[Written]) -> None:
        """Write the index over the files of all ranks (on rank zero)."""
        self._planned.finish(self._metadata, [each.results for each in written])


def plan(sharded: dict[str, Any], folder: Path, others: dict[str, bytes], copies: dist.ProcessGroup) -> Writing:
    """Agree on who writes what. A collective.

    Args:
        sharded: megatron-core's description of the tensors and objects of this rank.
        others: names and contents of further files that this rank writes.
        copies: the ranks that hold the same weights, and share the writing.
    """
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    FullyParallelSaveStrategyWrapper(strategy, copies).apply_saving_parallelization(sharded)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    writer = _Planned(folder)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    (_, metadata, _), *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key), writer, planner=planner)
    return Writing(folder, others, Mailbox(), writer, metadata)


def _on_host(items: list[Item]) -> list[Item]:
    return [(item, data.cpu() if isinstance(data, Tensor) else data) for item, data in items]


def _write(file: Path, items: list[Item], others: dict[str, bytes], mailbox: Mailbox) -> None:
    """In the writing process: all files of this rank."""
    torch.set_num_threads(1)  # the threads of a forked process' pool do not exist
    answer: Written | Exception
    try:
        results = _write_items(file, items)
        for name, content in others.items():
            store.write_durably(file.parent / name, content)
        answer = Written(results, {name: store.digest(file.parent / name) for name in (file.name, *others)})
    except (OSError, RuntimeError) as error:
        answer = error
    mailbox.put(answer)


def _write_items(file: Path, items: list[Item]) -> list[WriteResult]:
    """One after the other, in the form that torch's FileSystemReader reads."""
    results = []
    with file.open("wb") as stream:
        for item, data in items:
            start = stream.tell()
            if isinstance(data, io.BytesIO):
                stream.write(data.getbuffer())
            else:
                # A part of a larger buffer would be written with all of that buffer.
                part = data.untyped_storage().nbytes() > data.nbytes
                torch.save(data.detach().clone() if part else data.detach(), stream)
            place = _StorageInfo(file.name, start, stream.tell() - start)
            results.append(WriteResult(item.index, place.length, place))
        stream.flush()
        os.fsync(stream.fileno())
    return results
