"""Memory of the device that training needs for a moment only: given back, and brought again with the same contents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class Away:
    """The memory of some tensors, on the device or away from it.

    A tensor that is away keeps its identity, shape and place; only its storage is given back. ``tensors`` is asked each
    time, because an optimizer makes its state at its first step. With ``keep`` the contents wait in host memory,
    otherwise they are lost.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keep: bool) -> None:
        self._tensors, self._keep = tensors, keep
        self._away: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    def send(self) -> int:
        """Free the memory, unless it is away already; the number of bytes freed."""
        if self._away:
            return 0
        unique = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in self._tensors()}
        for storage in unique.values():
            host = None
            if self._keep:
                host = torch.UntypedStorage(storage.nbytes())
                host = (host.pin_memory() if storage.is_cuda else host).copy_(storage, non_blocking=True)
            self._away.append((storage, storage.nbytes(), host))
        if any(storage.is_cuda for storage in unique.values()):
            torch.cuda.synchronize()
        for storage in unique.values():
            storage.resize_(0)
        return sum(size for _, size, _ in self._away)

    def fetch(self) -> None:
        """Bring the memory back, with the same bits where they were kept."""
        for storage, size, host in self._away:
            storage.resize_(size)
            if host is not None:
                storage.copy_(host, non_blocking=True)
        self._away.clear()

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """With the memory on the device."""
        self.fetch()
        try:
            yield
        finally:
            self.send()


def optimizer_state(optimizer: Any, besides: Collection[Tensor]) -> list[Tensor]:
    """The moments and fp32 master weights of megatron-core's optimizer, but for what lies in the memory of ``besides``
    (master weights that are views of the model's own fp32 weights)."""
    kept = {p.untyped_storage().data_ptr() for p in besides}
    tensors: list[Tensor] = []
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            tensors += [p.data for p in group["params"]]
        tensors += [x for state in part.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    return [x for x in tensors if x.dim() and x.untyped_storage().data_ptr() not in kept]
