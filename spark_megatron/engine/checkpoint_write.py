"""How a checkpoint's files come to be written: planned by all ranks, written by a process of each, beside the training.

On a CPU that process is a fork of the training process, which sees the memory as it was at that moment: nothing is
copied, and training may go on at once. On a GPU it is a process that stays, to which the tensors are copied before
``start`` returns. It opens files and computes checksums; it takes no part in collectives.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
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
from spark_megatron.engine.mailbox import Mailbox

Item = tuple[WriteItem, Tensor | io.BytesIO]

_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent dies."""


@dataclass(frozen=True)
class Written:
    """What one rank wrote: where each tensor lies, for the index of the checkpoint, and a digest per file."""

    results: list[WriteResult]
    digests: dict[str, dict[str, Any]]


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
    mailbox: Mailbox[Written]
    _planned: _Planned
    _metadata: Any

    def request(self, finish: Callable[[], None]) -> AsyncRequest:
        """For megatron-core's queue; ``finish`` is called on all ranks when all have written."""
        items = self._planned.items
        arguments = (self.folder / self._planned.name, items, self.others, self.mailbox)
        if torch.cuda.is_available():
            return AsyncRequest(_write, arguments, [finish], preload_fn=partial(_on_host, items))
        return AsyncRequest(partial(_write_in_fork, os.getpid()), arguments, [finish])

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


def _write_in_fork(parent: int, *arguments: Any) -> None:
    """As ``_write``, in a fork of the process ``parent``, and no longer than that lives.

    Without it nobody could complete the checkpoint; and its peers would not see its end as long as their connections,
    which a fork has too, are open.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the training process ended")
    torch.set_num_threads(1)  # the threads of its pool do not exist here
    _write(*arguments)


def _write(file: Path, items: list[Item], others: dict[str, bytes], mailbox: Mailbox[Written]) -> None:
    """In the writing process: all files of this rank."""
    try:
        results = _write_items(file, items)
        for name, content in others.items():
            store.write_durably(file.parent / name, content)
        mailbox.put(Written(results, {name: store.digest(file.parent / name) for name in (file.name, *others)}))
    except OSError as error:
        mailbox.put(error)


def _write_items(file: Path, items: list[Item]) -> list[WriteResult]:
    """One after the other, in the form that torch's FileSystemReader reads."""
    results = []
    with file.open("wb") as stream:
        for item, data in items:
            start = stream.tell()
            stream.write((data if isinstance(data, io.BytesIO) else _serialised(data)).getbuffer())
            place = _StorageInfo(file.name, start, stream.tell() - start)
            results.append(WriteResult(item.index, place.length, place))
        stream.flush()
        os.fsync(stream.fileno())
    return results


def _serialised(tensor: Tensor) -> io.BytesIO:
    """In memory first: written to a full disk, torch.save says nothing of the disk."""
    tensor, stream = tensor.detach(), io.BytesIO()
    # A part of a larger buffer would be saved with all of that buffer.
    torch.save(tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor, stream)
    return stream
