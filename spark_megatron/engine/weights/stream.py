"""HF directory -> this rank's parameters, and this rank's parameters -> a stream of full HF tensors."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spark_megatron.engine.weights.placement import Placement
from spark_megatron.slices import Row

Bucket = list[tuple[str, Tensor]]

FILE_BYTES = 5_000_000_000
"""Weights of a saved directory are cut into files of about this size, so that one of them fits in memory."""


def _files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, of a single-file or sharded safetensors directory."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {k: directory / v for k, v in json.loads(index.read_text())["weight_map"].items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"model directory {directory} has neither model.safetensors nor {index.name}")
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def _check_names(wanted: set[str], found: set[str], directory: Path) -> None:
    for name in sorted(wanted - found):
        near = difflib.get_close_matches(name, sorted(found - wanted), 1)
        hint = f"; the nearest there is {near[0]}" if near else ""
        raise ValueError(f"{directory} has no tensor {name}, which its config.json calls for{hint}")
    for name in sorted(found - wanted):
        near = difflib.get_close_matches(name, sorted(wanted), 1)
        hint = f"; the nearest known name is {near[0]}" if near else ""
        raise ValueError(f"{directory} holds the tensor {name}, which its config.json does not call for{hint}")


def load_hf(placement: Placement, directory: str | Path, drawn: Mapping[str, Tensor] | None = None) -> None:
    """Fill this rank's parameters from a HF directory, reading no more than their elements.

    ``drawn`` has tensors for what the directory may lack: a new head in the place of a language model's. Every rank
    checks the names and shapes of all tensors, so that all of them refuse a directory together.

    Raises:
        ValueError: names a missing, unknown or misshapen tensor.
    """
    path = Path(directory)
    files = _files(path)
    # A tied head that was saved nevertheless is the embedding again.
    new = {name: tensor for name, tensor in (drawn or {}).items() if name not in files}
    unwanted = {"lm_head.weight"} if placement.model.tied or new else set()
    _check_names({name for row in placement.rows for name in row.hf}, set(files) - unwanted | set(new), path)
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in sorted(set(files.values()))}
        for row in placement.rows:
            tensors: list[Any] = [new[name] if name in new else opened[files[name]].get_slice(name) for name in row.hf]
            for name, tensor, shape in zip(row.hf, tensors, row.shapes, strict=True):
                found = tuple(tensor.shape if name in new else tensor.get_shape())
                if found != shape:
                    raise ValueError(f"{path}: {name} has shape {found}, its config.json calls for {shape}")
            if row.full_name in placement.local:
                _fill(placement, row, tensors)


@torch.no_grad()
def _fill(placement: Placement, row: Row, tensors: list[Any]) -> None:
    parameter = placement.local[row.full_name]
    end = 0
    for offset, segment in row.segments(placement.parallel.layout.tensor, placement.parallel.tensor_rank):
        index = (slice(None),) * row.dim + (slice(segment.start, segment.stop),)
        end = offset + len(segment)
        parameter.narrow(row.dim, offset, len(segment)).copy_(tensors[segment.tensor][index])
    parameter.narrow(row.dim, end, parameter.shape[row.dim] - end).zero_()


@dataclass(frozen=True)
class _Unit:
    """What is gathered together: one row, or the rows that the expert-parallel ranks hold in each other's stead."""

    rows: tuple[Row, ...]
    stage: int

    @property
    def elements(self) -> int:
        return sum(row.elements for row in self.rows)

    @property
    def of_experts(self) -> bool:
        return self.rows[0].expert is not None


def _units(placement: Placement) -> list[_Unit]:
    """All exported rows: stage by stage, and within a stage experts behind the rest."""
    units: dict[tuple[int, int, str], list[Row]] = {}
    for row in placement.rows:
        if row.exported:
            at = placement.home(row)
            units.setdefault((at.stage, at.chunk, at.name), []).append(row)
    found = [_Unit(tuple(rows), stage) for (stage, _, _), rows in units.items()]
    return sorted(found, key=lambda unit: (unit.stage, unit.of_experts))


def _buckets(placement: Placement, limit: int, itemsize: int) -> Iterator[list[_Unit]]:
    """Consecutive units of one stage and kind, at most ``limit`` bytes of full tensors (a larger one is alone)."""
    bucket: list[_Unit] = []
    size = 0
    for unit in _units(placement):
        bytes_ = itemsize * unit.elements
        alike = bucket and (unit.stage, unit.of_experts) == (bucket[0].stage, bucket[0].of_experts)
        if bucket and (size + bytes_ > limit or not alike):
            yield bucket
            bucket, size = [], 0
        bucket.append(unit)
        size += bytes_
    if bucket:
        yield bucket


def export_hf(placement: Placement, bucket_bytes: int) -> Iterator[Bucket]:
    """Stream the model as full HF tensors, bucket by bucket, on every rank. A collective: all ranks iterate together.

    A bucket is gathered in one collective from all ranks that hold a part of it and then broadcast from its pipeline
    stage. Putting its tensors together takes a second copy of the bucket for a moment. The tensors of a bucket are
    valid until the next one is asked for.
    """
    some = next(iter(placement.local.values()))
    for units in _buckets(placement, bucket_bytes, some.element_size()):
        yield _full(placement, units, _gather(placement, units, some))


def _gather(placement: Placement, units: list[_Unit], like: Tensor) -> Tensor:
    """[ranks, elements]: the units' shards from every tensor-parallel rank (of every expert-parallel rank in turn)."""
    parallel, unit = placement.parallel, units[0]
    group = parallel.expert_tensor_model_group if unit.of_experts else parallel.tensor_group
    sizes = [math.prod(row.shard_shape(parallel.layout.tensor)) for row in (unit.rows[0] for unit in units)]
    gathered = torch.empty(group.size(), sum(sizes), dtype=like.dtype, device=like.device)
    if unit.stage == parallel.pipeline_rank:
        own = parallel.expert_rank if unit.of_experts else 0
        shards = [placement.local[unit.rows[own].full_name].detach() for unit in units]
        dist.all_gather_into_tensor(gathered.view(-1), torch.cat([x.flatten() for x in shards]), group=group)
    if parallel.layout.pipeline > 1:
        source = dist.get_global_rank(parallel.pipeline_group, unit.stage)
        dist.broadcast(gathered, source, group=parallel.pipeline_group)
    return gathered


def _full(placement: Placement, units: list[_Unit], gathered: Tensor) -> Bucket:
    tp = placement.parallel.layout.tensor
    bucket: Bucket = []
    offset = 0
    for unit in units:
        shape = unit.rows[0].shard_shape(tp)
        columns = gathered[:, offset : offset + math.prod(shape)]
        offset += math.prod(shape)
        for row, shards in zip(unit.rows, columns.split(tp), strict=True):
            bucket += zip(row.hf, assemble(row, [shard.view(shape) for shard in shards]), strict=True)
    return bucket


def assemble(row: Row, shards: list[Tensor]) -> list[Tensor]:
    """The row's full HF tensors from its parameter on every tensor-parallel rank; views of a single shard if possible.

    A rank's segments of one HF tensor lie in order, and behind those of the ranks before it.
    """
    parts: list[list[Tensor]] = [[] for _ in row.hf]
    for rank, shard in enumerate(shards if row.cut else shards[:1]):
        for offset, segment in row.segments(len(shards), rank):
            parts[segment.tensor].append(shard.narrow(row.dim, offset, len(segment)))
    alone = len(shards) == 1
    return [some[0] if alone and len(some) == 1 else torch.cat(some, row.dim) for some in parts]


class _Writer:
    """Writes tensors into as many safetensors files as their size asks for, named as transformers names them."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        self.directory, self.file_bytes = directory, file_bytes
        self.tensors: dict[str, Tensor] = {}
        self.size = self.total = 0
        self.parts: list[tuple[Path, list[str]]] = []

    def add(self, bucket: Bucket) -> None:
        for name, tensor in bucket:
            bytes_ = tensor.numel() * tensor.element_size()
            if self.tensors and self.size + bytes_ > self.file_bytes:
                self._write()
            self.tensors[name] = tensor.to("cpu", copy=True).contiguous()
            self.size += bytes_
            self.total += bytes_

    def _write(self) -> None:
        path = self.directory / f"model-{len(self.parts) + 1:05d}.partial"
        save_file(self.tensors, path, metadata={"format": "pt"})
        self.parts.append((path, list(self.tensors)))
        self.tensors, self.size = {}, 0

    def finish(self) -> None:
        """Give the files their names, which say how many there are, and write the index of more than one."""
        self._write()
        index = self.directory / "model.safetensors.index.json"
        index.unlink(missing_ok=True)
        count = len(self.parts)
        weight_map: dict[str, str] = {}
        for i, (path, names) in enumerate(self.parts, 1):
            file = "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
            path.rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            content = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_hf(placement: Placement, source: Path, target: Path, bucket_bytes: int, file_bytes: int = FILE_BYTES) -> None:
    """Write a HF directory that transformers and vLLM load, from rank 0: the weights, and config, tokenizer and what
    else is in ``source``. A collective: all ranks call it together."""
    writer = None
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.is_file() and not file.name.startswith("model"):
                shutil.copyfile(file, target / file.name)
        if placement.model.scalar:
            placement.hf.to_json_file(target / "config.json")  # the source's may be that of a language model
        writer = _Writer(target, file_bytes)
    for bucket in export_hf(placement, bucket_bytes):
        if writer is not None:
            writer.add(bucket)
    if writer is not None:
        writer.finish()
    dist.barrier()
