"""Optimizer state in host memory: the largest part of all memory, needed for a moment in each update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class HostState:
    """Keeps the moments and the fp32 master weights of megatron-core's optimizer in host memory.

    A tensor that is away keeps its identity, shape and place in the optimizer; only its storage on the device is given
    back. Master weights that are views of the model's own fp32 weights stay where they are.
    """

    def __init__(self, optimizer: Any, module_parameters: list[Tensor]) -> None:
        self._optimizer = optimizer
        self._kept = {p.untyped_storage().data_ptr() for p in module_parameters}
        self._away: list[tuple[Tensor, Tensor]] = []

    def _state(self) -> list[Tensor]:
        tensors: list[Tensor] = []
        for part in self._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                tensors += [p.data for p in group["params"]]
            tensors += [x for state in part.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
        return [x for x in tensors if x.dim() and x.untyped_storage().data_ptr() not in self._kept]

    def send(self) -> None:
        """Copy the state to the host and free its memory on the device."""
        for tensor in self._state():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._away.append((tensor, host.copy_(tensor, non_blocking=True)))
        if any(tensor.is_cuda for tensor, _ in self._away):
            torch.cuda.synchronize()
        for tensor, _ in self._away:
            tensor.untyped_storage().resize_(0)

    def fetch(self) -> None:
        """Bring the state back; the same bits in the same tensors."""
        for tensor, host in self._away:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.copy_(host, non_blocking=True)
        self._away.clear()

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """With the state on the device."""
        self.fetch()
        try:
            yield
        finally:
            self.send()
