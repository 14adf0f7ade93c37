"""How a process gets an answer from another one that may die, or live where nothing can be written."""

from __future__ import annotations

import os
import pickle
from multiprocessing.reduction import DupFd
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A piece of memory for one answer. It goes to the other process by a fork or through a queue."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("answer") if descriptor is None else descriptor

    def __reduce__(self) -> Any:
        return _received, (DupFd(self.descriptor),)

    def put(self, answer: T | Exception) -> None:
        """Leave the answer. Once, in the other process."""
        with open(self.descriptor, "wb") as stream:
            pickle.dump(answer, stream)

    def take(self) -> T | Exception:
        """The answer, or an error that says that there is none. Once, when the other process has ended."""
        with open(self.descriptor, "rb") as stream:
            stream.seek(0)
            content = stream.read()
        return pickle.loads(content) if content else ChildProcessError("its writing process died; is memory short?")


def _received(shared: Any) -> Mailbox[Any]:
    """A mailbox that came from another process."""
    return Mailbox(shared.detach())
