"""How far a piece of work has come, and when it will be done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from spark_megatron.tracking.console import duration

_QUIET_S = 5.0
"""Where lines cannot be overwritten, one comes at most this often, and at the end of a piece."""


class Progress:
    """A line for each piece of work: what it is, how much is done, and the time left at its pace so far.

    On a terminal the line is overwritten; anywhere else (a log file) lines follow each other, a few per minute.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._told = 0.0

    def start(self, what: str, total: int) -> None:
        """Begin a piece of ``total`` items."""
        self._what, self._total, self._done = what, total, 0
        self._began = self._told = self._clock()

    def advance(self, items: int) -> None:
        """So many more items are done."""
        self._done += items
        now, ended = self._clock(), self._done >= self._total
        passed = now - self._began
        left = passed * (self._total - self._done) / self._done if self._done else None
        when = f"took {duration(passed)}" if ended else f"left {duration(left)}"
        line = f"{self._what}: {self._done}/{self._total}, {when}"
        if self._stream.isatty():
            print(f"\r\033[K{line}", end="\n" if ended else "", file=self._stream, flush=True)
        elif ended or now - self._told >= _QUIET_S:
            self._told = now
            print(line, file=self._stream, flush=True)
