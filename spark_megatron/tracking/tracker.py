"""One object for everything that a training loop has to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from spark_megatron.tracking.clock import Clock, peak_rss_gb
from spark_megatron.tracking.recorder import Recorder
from spark_megatron.tracking.sinks import Sink
from spark_megatron.types import Group, Metrics


class Tracker:
    """Gathers the metrics of a step and hands them to every sink when the step is over.

        with track.step(step) as span:
            with span("rollout"):
                ...
            track.log({"policy/kl": kl})
            track.record(groups)

    Sinks and recorder belong to rank zero alone; the other ranks pass ``sinks=()`` and ``recorder=None`` and run the
    same code. ``total_steps`` is the length of the run, for the time that is left.
    """

    def __init__(
        self, *, sinks: Sequence[Sink], recorder: Recorder | None, total_steps: int, clock: Clock | None = None
    ) -> None:
        self._sinks = tuple(sinks)
        self._recorder = recorder
        self._total_steps = total_steps
        self._clock = clock or Clock()
        self._step: int | None = None
        self._metrics: Metrics = {}

    @contextmanager
    def step(self, step: int) -> Iterator[Clock]:
        """A step of the run; yields the clock, to be called with the name of a phase.

        ``step`` is written as it is; count from one, so that step ``total_steps`` is the last. Adds ``time/<phase>``,
        ``time/other``, ``time/step`` and ``time/eta`` in seconds, ``memory/peak_rss_gb``, and ``tokens/per_s`` from
        ``tokens/generated`` (without sampling ``tokens/trained``) over the whole step where the loop did not log its
        own. A step that raises is not logged.
        """
        self._step, self._metrics = step, {}
        self._clock.begin()
        try:
            yield self._clock
            self._emit(step)
        finally:
            self._step = None

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add to the metrics of the open step; a name logged again replaces its value. RuntimeError outside a step."""
        if self._step is None:
            raise RuntimeError("track.log came outside a step; call it within `with track.step(...)`")
        self._metrics.update(metrics)

    def record(self, groups: Iterable[Group]) -> None:
        """Record checked groups of the open step. Does nothing without a recorder; RuntimeError outside a step."""
        if self._step is None:
            raise RuntimeError("track.record came outside a step; call it within `with track.step(...)`")
        if self._recorder is None:
            return
        for kind, rows in self._recorder.record(self._step, groups).items():
            for sink in self._sinks:
                sink.record(self._step, kind, rows)

    def close(self) -> None:
        """Close the recorder and every sink."""
        if self._recorder is not None:
            self._recorder.close()
        for sink in self._sinks:
            sink.close()

    def _emit(self, step: int) -> None:
        times = self._clock.end()
        eta = self._clock.eta(step, self._total_steps)
        metrics = {**self._metrics, **times, "memory/peak_rss_gb": peak_rss_gb()}
        if eta is not None:
            metrics["time/eta"] = eta
        tokens = metrics.get("tokens/generated", metrics.get("tokens/trained"))
        if tokens is not None and times["time/step"] > 0:
            metrics.setdefault("tokens/per_s", tokens / times["time/step"])
        for sink in self._sinks:
            sink.log(step, metrics)
