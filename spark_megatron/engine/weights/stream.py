"""HF directory -> this rank's parameters, and this rank's parameters -> a stream of full HF tensors."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spark_megatron.engine.parallel import Parallel
from spark_megatron.engine.weights.table import FIRST, LAST, Row

Bucket = list[tuple[str, Tensor]]


class Placement:
    """Where the rows of a table live: the pipeline stage, and the local parameter of each row on this rank."""

    def __init__(self, rows: list[Row], model: torch.nn.Module, parallel: Parallel, layers: int) -> None:
        self.rows, self.parallel = rows, parallel
        self.layers_per_stage = layers // parallel.layout.pipeline
        parameters = dict(model.named_parameters())
        self.local: dict[str, Tensor] = {}
        for row in rows:
            if self.stage(row) == parallel.pipeline_rank:
                parameter = parameters.pop(self._local_name(row), None)
                if parameter is not None:
                    # megatron-core marks weights as it initialises them, and this model is never initialised; an
                    # unmarked slice would count as a duplicate and be left out of the gradient norm. Biases are marked.
                    if not hasattr(parameter, "tensor_model_parallel"):
                        set_tensor_model_parallel_attributes(parameter, row.dim is not None, row.dim or 0, 1)
                    self.local[row.mcore] = parameter
                elif row.exported:
                    raise RuntimeError(f"the weight table has {row.mcore}, but the model has no such parameter")
        if parameters:
            raise RuntimeError(f"the weight table has no row for the parameters {sorted(parameters)}")

    def stage(self, row: Row) -> int:
        if row.place == FIRST:
            return 0
        if row.place == LAST:
            return self.parallel.layout.pipeline - 1
        return int(row.place) // self.layers_per_stage

    def _local_name(self, row: Row) -> str:
        if isinstance(row.place, str):
            return row.mcore
        return row.mcore.replace(f"layers.{row.place}.", f"layers.{row.place % self.layers_per_stage}.", 1)


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


def load_hf(placement: Placement, directory: str | Path) -> None:
    """Fill this rank's parameters from a HF directory; ValueError names a missing, unknown or misshapen tensor."""
    path = Path(directory)
    files = _files(path)
    tied = not any("lm_head.weight" in row.hf for row in placement.rows)
    found = set(files) - ({"lm_head.weight"} if tied else set())
    _check_names({name for row in placement.rows for name in row.hf}, found, path)
    tp, rank = placement.parallel.layout.tensor, placement.parallel.tensor_rank
    for row in placement.rows:
        parameter = placement.local.get(row.mcore)
        if parameter is None:
            continue
        tensors = []
        for name, shape in zip(row.hf, row.hf_shapes(), strict=True):
            with safe_open(files[name], "pt") as file:
                tensor = file.get_tensor(name)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{path}: {name} has shape {tuple(tensor.shape)}, its config.json calls for {shape}")
            tensors.append(tensor.to(parameter.dtype))
        with torch.no_grad():
            parameter.copy_(row.shard(row.join(tensors, tp), tp, rank))


def _buckets(placement: Placement, limit: int, itemsize: int) -> Iterator[list[Row]]:
    """Consecutive exported rows of one stage, at most ``limit`` bytes of full tensors (a larger one is alone)."""
    bucket: list[Row] = []
    size = 0
    for row in placement.rows:
        if not row.exported:
            continue
        bytes_ = itemsize * sum(torch.Size(shape).numel() for shape in row.hf_shapes())
        if bucket and (size + bytes_ > limit or placement.stage(row) != placement.stage(bucket[0])):
            yield bucket
            bucket, size = [], 0
        bucket.append(row)
        size += bytes_
    if bucket:
        yield bucket


def export_hf(placement: Placement, bucket_bytes: int) -> Iterator[Bucket]:
    """Stream the model as full HF tensors, bucket by bucket, on every rank. A collective: all ranks iterate together.

    A bucket is gathered over the tensor-parallel ranks in one collective and then broadcast from its pipeline stage.
    The tensors of a bucket are valid until the next one is asked for.
    """
    parallel = placement.parallel
    tp = parallel.layout.tensor
    some = next(iter(placement.local.values()))
    for rows in _buckets(placement, bucket_bytes, some.element_size()):
        stage = placement.stage(rows[0])
        full = [row.join([torch.empty(s, device="meta") for s in row.hf_shapes()], tp) for row in rows]
        shapes = [row.shard(tensor, tp, 0).shape for row, tensor in zip(rows, full, strict=True)]
        sizes = [shape.numel() for shape in shapes]
        gathered = torch.empty(tp, sum(sizes), dtype=some.dtype, device=some.device)
        if stage == parallel.pipeline_rank:
            flat = torch.cat([placement.local[row.mcore].detach().flatten() for row in rows])
            dist.all_gather_into_tensor(gathered.view(-1), flat, group=parallel.tensor_group)
        if parallel.layout.pipeline > 1:
            source = dist.get_global_rank(parallel.pipeline_group, stage)
            dist.broadcast(gathered, source, group=parallel.pipeline_group)
        columns = gathered.split(sizes, 1)
        bucket: Bucket = []
        for row, shape, column in zip(rows, shapes, columns, strict=True):
            tensor = row.unshard([shard.view(shape) for shard in column.contiguous()])
            bucket += zip(row.hf, row.split(tensor), strict=True)
        yield bucket


def save_hf(placement: Placement, directory: str | Path, bucket_bytes: int) -> None:
    """Write model.safetensors into ``directory`` from rank 0. A collective: all ranks call it together."""
    keep = dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for bucket in export_hf(placement, bucket_bytes):
        if keep:
            tensors |= {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in bucket}
    if keep:
        path = Path(directory) / "model.safetensors"
        temporary = path.with_suffix(".partial")
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.rename(path)
