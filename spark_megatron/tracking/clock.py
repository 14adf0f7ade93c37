"""Where a step's time goes, how long the run still takes, and how much memory it took."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark_megatron.types import Metrics


class Clock:
    """Wall seconds per phase of the current step.

    ``with clock("rollout"): ...`` adds to the phase of that name. In nested phases every second belongs to the
    innermost one, so that the phases and ``other`` (all the rest) always add up to the step.
    ``now`` returns seconds that never go back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._began = self._mark = now()
        self._first_seen = False
        self._total, self._steps = 0.0, 0

    def begin(self) -> None:
        """Start a step: forget the phases of the last one."""
        self._open, self._seconds = [], {}
        self._began = self._mark = self._now()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time of the block for ``phase``, also when the block raises."""
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def end(self) -> Metrics:
        """Finish the step: ``time/<phase>``, ``time/other`` and ``time/step`` in seconds."""
        self._charge()
        step = self._now() - self._began
        phases = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        other = phases.pop("time/other", 0.0) + step - sum(self._seconds.values())
        if self._first_seen:
            self._total, self._steps = self._total + step, self._steps + 1
        self._first_seen = True
        return {**phases, "time/other": max(0.0, other), "time/step": step}

    def eta(self, step: int, total: int) -> float | None:
        """Seconds until ``total`` steps are done when ``step`` are, by the mean of the steps seen; None when unknown.

        The first step of a process is left out of the mean: it pays for compilation and warm-up.
        """
        if not self._steps:
            return None
        return max(0, total - step) * self._total / self._steps

    def _charge(self) -> None:
        now = self._now()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now


def peak_rss_gb() -> float:
    """Peak resident memory so far, in 10^9 bytes: the larger of this process and its largest ended child.

    The two peaks are not added, since they need not coincide and a forked child shares its parent's pages.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(peaks) * unit / 1e9
