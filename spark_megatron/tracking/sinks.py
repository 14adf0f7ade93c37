"""Where metrics go. A sink is anything that follows ``Sink``; files and TensorBoard live here."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spark_megatron.tracking.jsonl import JsonlWriter

Row = Mapping[str, Any]
"""One recorded group, as written to rollouts.jsonl."""


class Sink(Protocol):
    """A receiver of a run's numbers. Steps arrive in ascending order; ``close`` is called once, at the end."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one finished step."""

    def record(self, step: int, kind: str, rows: Sequence[Row]) -> None:
        """Take the recorded groups of one step and task kind. Sinks of numbers alone ignore them."""
        return None

    def close(self) -> None:
        """Flush and let go of everything."""


class JsonlSink(Sink):
    """``metrics.jsonl``: one object per step with ``step``, ``time`` (Unix seconds) and the metrics, flushed at once.

    NaN and infinities are written as null.
    """

    def __init__(self, *, path: str | Path) -> None:
        self._writer = JsonlWriter(Path(path))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.write({"step": step, "time": round(time.time(), 3), **metrics})

    def close(self) -> None:
        self._writer.close()


class TensorboardSink(Sink):
    """TensorBoard event files in ``directory``. Values that are not finite are left out: its plots break on them."""

    def __init__(self, *, directory: str | Path) -> None:
        # Imported here because it takes seconds and only this sink needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
