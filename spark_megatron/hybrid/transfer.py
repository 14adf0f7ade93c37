"""This rank's part of a hand-over plan: send, receive and put together what the sampler wants, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spark_megatron.hybrid.plan import Shipment, Sides, plan
from spark_megatron.slices import Row


@dataclass(frozen=True)
class Step:
    """What this rank does with one shipment."""

    shipment: Shipment
    keeps: bool
    sender: int | None
    """The rank that it comes from."""
    later: bool
    """Whether that rank has to receive it first."""
    receivers: tuple[int, ...]
    """The ranks that get it from this one, at once where it holds it, and otherwise when it has come."""

    @property
    def wanted(self) -> bool:
        return self.keeps or self.sender is not None

    @property
    def staged(self) -> int:
        """Bytes that it takes beside the parameters of both sides."""
        packed = self.receivers and self.sender is None and not self.shipment.contiguous
        return self.shipment.bytes if packed or self.sender is not None else 0


@dataclass
class Parameter:
    """One of the sampler's parameters on this rank, put together from rows: one, or one for each expert."""

    rows: list[Row] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def shape(self, degree: int) -> tuple[int, ...]:
        shape = self.rows[0].shard_shape(degree)
        return shape if self.rows[0].expert is None else (len(self.rows), *shape)


class Transfer:
    """Hands this rank's share of the trainer's weights to its sampler, again and again; all ranks take part together.

    Args:
        sides: both layouts.
        parameters: this rank's parameters of the trainer, by the full names of its rows; read at every run.
        bucket_bytes: what all that is on the way at one time may take on any rank. Beside it there is the memory of one
            module of the sampler, while that is put together.
    """

    def __init__(self, sides: Sides, parameters: Mapping[str, Tensor], bucket_bytes: int) -> None:
        self.sides, self.parameters = sides, parameters
        self.rank = dist.get_rank()
        where = sides.positions
        self.tensor_rank, self.sampler_rank = int(where["tensor"][self.rank]), int(where["sampler"][self.rank])
        self.buckets: list[list[Step]] = []
        self.modules: dict[str, dict[str, Parameter]] = {}
        self._last: dict[str, Step] = {}
        for bucket in _buckets(plan(sides, bucket_bytes), sides.world, bucket_bytes):
            self.buckets.append(steps := [step for step in (self._step(shipment) for shipment in bucket) if step])
            for step in steps:
                if step.wanted:
                    self._note(step)
        self._views = {name for module in self.modules.values() for name, p in module.items() if self._is_view(p)}
        self.bytes = sum(step.shipment.bytes for bucket in self.buckets for step in bucket if step.sender is not None)
        """Bytes that this rank receives in a run."""
        self.staging = max((sum(step.staged for step in bucket) for bucket in self.buckets), default=0)
        """The most bytes on the way at one time."""
        self.workspace = max((self._module_bytes(module) for module in self.modules.values()), default=0)
        """Bytes of the largest module that has to be put together."""

    def _step(self, shipment: Shipment) -> Step | None:
        here = np.flatnonzero(shipment.receivers == self.rank)
        step = Step(
            shipment,
            keeps=bool((shipment.keepers == self.rank).any()),
            sender=int(shipment.senders[here[0]]) if len(here) else None,
            later=bool(shipment.later[here[0]]) if len(here) else False,
            receivers=tuple(shipment.receivers[shipment.senders == self.rank].tolist()),
        )
        return step if step.wanted or step.receivers else None

    def _note(self, step: Step) -> None:
        row = step.shipment.target
        name, module = row.full_name, _module(row)
        if module in self.modules and module != next(reversed(self.modules)):
            raise ValueError(f"the sampler's table has {name} apart from the rest of its module")
        parameter = self.modules.setdefault(module, {}).setdefault(name, Parameter())
        parameter.steps.append(step)
        self._last[module] = step
        if row not in parameter.rows:
            parameter.rows.append(row)

    def run(self) -> Iterator[dict[str, Tensor]]:
        """The sampler's parameters of one module after the other, by name; tensors are valid until the next is asked
        for. Those that lie as the sampler wants them are the trainer's own. A collective."""
        like = next(iter(self.parameters.values()))
        staging = torch.empty(self.staging, dtype=torch.uint8, device=like.device)
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=like.device)
        ready: dict[str, Tensor] = {}
        for bucket in self.buckets:
            parcels = self._exchange(bucket, staging, like)
            for step, parcel in zip(bucket, parcels, strict=True):
                if not step.wanted:
                    continue
                name, module = step.shipment.target.full_name, _module(step.shipment.target)
                if not ready:
                    ready = self._prepare(self.modules[module], workspace, like)
                if name not in self._views:
                    self._place(step, parcel, ready[name])
                if step is self._last[module]:
                    yield ready
                    ready = {}

    def _source(self, step: Step) -> Tensor:
        """The trainer's parameter that has a parcel."""
        return next(
            self.parameters[row.full_name] for row in step.shipment.sources if row.full_name in self.parameters
        ).detach()

    def _exchange(self, bucket: Sequence[Step], staging: Tensor, like: Tensor) -> list[Tensor | None]:
        """Everything that a bucket moves, first from holders, then from those that it came to first."""
        parcels: list[Tensor | None] = []
        used = 0
        for step in bucket:
            buffer = staging[used : used + step.staged]
            used += step.staged
            parcels.append(self._packed(step, buffer, like) if step.sender is None and step.receivers else None)
            if step.sender is not None:
                parcels[-1] = buffer.view(like.dtype).view(self._parcel_shape(step))
        for later in (False, True):
            work = []
            for step, parcel in zip(bucket, parcels, strict=True):
                if parcel is None:
                    continue
                flat = parcel.reshape(-1).view(torch.uint8)
                if step.sender is not None and step.later == later:
                    work.append(dist.P2POp(dist.irecv, flat, step.sender))
                if (step.sender is not None) == later:
                    work += [dist.P2POp(dist.isend, flat, receiver) for receiver in step.receivers]
            for request in dist.batch_isend_irecv(work) if work else ():
                request.wait()
        return parcels

    def _parcel_shape(self, step: Step) -> tuple[int, ...]:
        row = step.shipment.target
        shape = row.shapes[0]
        return (*shape[: row.dim], len(step.shipment.parcel), *shape[row.dim + 1 :])

    def _packed(self, step: Step, buffer: Tensor, like: Tensor) -> Tensor:
        """A parcel that this rank holds, in one piece."""
        parcel, dim, source = step.shipment.parcel, step.shipment.target.dim, self._source(step)
        offsets = parcel.held[self.tensor_rank]
        pieces = [source.narrow(dim, o, n) for o, n in zip(offsets, parcel.lengths, strict=True)]
        if step.shipment.contiguous:
            return pieces[0]
        out = buffer.view(like.dtype).view(self._parcel_shape(step))
        return torch.cat(pieces, dim, out=out)

    def _place(self, step: Step, parcel: Tensor | None, into: Tensor) -> None:
        """Put a parcel that was kept or received where the sampler wants it."""
        shipped, row = step.shipment.parcel, step.shipment.target
        if row.expert is not None:
            into = into[row.expert]
        wanted = shipped.wanted[self.sampler_rank]
        if step.keeps:
            source, offsets = self._source(step), shipped.held[self.tensor_rank]
        else:
            assert parcel is not None
            source, offsets = parcel, tuple(np.cumsum([0, *shipped.lengths[:-1]]).tolist())
        for length, start, end in zip(shipped.lengths, offsets, wanted, strict=True):
            into.narrow(row.dim, end, length).copy_(source.narrow(row.dim, start, length))

    def _prepare(self, module: Mapping[str, Parameter], workspace: Tensor, like: Tensor) -> dict[str, Tensor]:
        """The tensors of a module: views of the trainer's own, or empty ones (zero where nothing will come)."""
        tensors: dict[str, Tensor] = {}
        used = 0
        for name, parameter in module.items():
            shape = parameter.shape(self.sides.tensor_parallel)
            if name in self._views:
                first = parameter.steps[0]
                start = first.shipment.parcel.held[self.tensor_rank][0]
                tensors[name] = self._source(first).narrow(
                    first.shipment.target.dim, start, shape[first.shipment.target.dim]
                )
                continue
            size = math.prod(shape) * self.sides.itemsize
            tensors[name] = workspace[used : used + size].view(like.dtype).view(shape)
            used += _aligned(size)
            if sum(len(step.shipment.parcel) for step in parameter.steps) < shape[_dim(parameter)] * len(
                parameter.rows
            ):
                tensors[name].zero_()
        return tensors

    def _is_view(self, parameter: Parameter) -> bool:
        """Whether the trainer's parameter has all of it in one piece, in the sampler's order and without padding."""
        row = parameter.rows[0]
        if row.expert is not None or not all(step.keeps for step in parameter.steps):
            return False
        shape, dim = row.shard_shape(self.sides.tensor_parallel), row.dim
        shifts, length = set(), 0
        for step in parameter.steps:
            shipped = step.shipment.parcel
            pairs = zip(shipped.held[self.tensor_rank], shipped.wanted[self.sampler_rank], strict=True)
            shifts |= {held - wanted for held, wanted in pairs}
            length += len(shipped)
        whole = self._source(parameter.steps[0]).shape == shape
        return len(shifts) == 1 and length == shape[dim] and (dim == 0 or whole)

    def _module_bytes(self, module: Mapping[str, Parameter]) -> int:
        degree = self.sides.tensor_parallel
        made = (parameter for name, parameter in module.items() if name not in self._views)
        return sum(_aligned(math.prod(p.shape(degree)) * self.sides.itemsize) for p in made)


def _module(row: Row) -> str:
    """The sampler's module that has a row's parameter."""
    return row.full_name.rpartition(".")[0]


def _dim(parameter: Parameter) -> int:
    row = parameter.rows[0]
    return row.dim + (row.expert is not None)


def _aligned(size: int) -> int:
    """A size after which any type may follow."""
    return -(-size // 64) * 64


def _buckets(shipments: Iterable[Shipment], world: int, limit: int) -> Iterator[list[Shipment]]:
    """Consecutive shipments that take at most ``limit`` bytes of staging on every rank. All ranks cut alike."""
    bucket: list[Shipment] = []
    load = np.zeros(world, np.int64)
    for shipment in shipments:
        more = np.zeros(world, np.int64)
        more[shipment.receivers] = shipment.bytes
        if not shipment.contiguous:
            more[shipment.senders] = shipment.bytes
        if bucket and (load + more).max() > limit:
            yield bucket
            bucket, load = [], np.zeros(world, np.int64)
        bucket.append(shipment)
        load += more
    if bucket:
        yield bucket
