"""An answer reaches the process that asked, from a fork or from any other process, or is said to be missing."""

import multiprocessing
import os
from typing import Any

import pytest

from spark_megatron.engine.mailbox import Mailbox


def answer(boxes: Any) -> None:
    boxes.get().put(OSError(28, "No space left on device"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_through_a_queue(method: str) -> None:
    context, box = multiprocessing.get_context(method), Mailbox[None]()
    boxes = context.Queue()
    boxes.put(box)
    process = context.Process(target=answer, args=(boxes,))
    process.start()
    process.join()
    told = box.take()
    assert isinstance(told, OSError)
    assert told.errno == 28


def test_inherited_by_a_fork() -> None:
    box = Mailbox[list[int]]()
    pid = os.fork()
    if pid == 0:
        box.put(list(range(100_000)))
        os._exit(0)
    os.waitpid(pid, 0)
    assert box.take() == list(range(100_000))


def test_a_process_that_left_none() -> None:
    assert str(Mailbox[None]().take()) == "its writing process died; is memory short?"
