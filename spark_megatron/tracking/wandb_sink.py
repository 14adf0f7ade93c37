"""Weights & Biases, kept at arm's length: it may fail or hang, and the run does not notice."""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from spark_megatron.tracking.jsonl import jsonable
from spark_megatron.tracking.sinks import Row, Sink

log = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled"]
QUEUE_SIZE = 1000
ROLLOUT_COLUMNS = ("step", "prompt", "answer", "text", "reward", "status", "parsed", "length")


class WandbSink(Sink):
    """Sends metrics and recorded rollouts to Weights & Biases from a thread of its own.

    ``mode`` online needs credentials and a network; without them the sink goes on in ``fallback`` (offline or
    disabled). Offline keeps the run under ``directory``/wandb for a later ``wandb sync``. Whatever goes wrong becomes
    one warning, after which the sink is off. ``timeout_s`` bounds the seconds that connecting and closing may take.
    ``client`` is the wandb module (imported on first use when None).

    The run's id is kept in ``directory``/wandb_id: a later sink there continues the same run, also where offline parts
    are synced. Steps that were sent already are not sent again by wandb.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str | None,
        mode: Mode,
        fallback: Literal["offline", "disabled"],
        directory: str | Path,
        timeout_s: float,
        config: Mapping[str, Any] | None = None,
        client: Any = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"wandb.mode={mode!r} is unknown; use one of {', '.join(get_args(Mode))}")
        if fallback not in ("offline", "disabled"):
            raise ValueError(f"wandb.fallback={fallback!r} is unknown; use offline or disabled")
        self._run_settings = {"project": project, "name": name, "dir": str(directory), "config": dict(config or {})}
        self._directory = Path(directory)
        self._mode, self._fallback, self._timeout = mode, fallback, timeout_s
        self._client = client
        self._run: Any = None
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_SIZE)
        self._on = mode != "disabled"
        # A daemon: the interpreter may end while it hangs in a call.
        self._thread = threading.Thread(target=self._work, name="wandb-sink", daemon=True)
        if self._on:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._thread.start()

    @property
    def on(self) -> bool:
        """Whether the sink still takes anything."""
        return self._on

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value for name, value in jsonable(metrics).items() if value is not None}
        self._submit(lambda: self._run.log(values, step=step))

    def record(self, step: int, kind: str, rows: Sequence[Row]) -> None:
        cells = [
            [step, row["prompt"], row["answer"], *(rollout[name] for name in ROLLOUT_COLUMNS[3:])]
            for row in rows
            for rollout in row["rollouts"]
        ]
        self._submit(lambda: self._log_table(step, kind, cells))

    def close(self) -> None:
        """Finish the run, waiting at most ``timeout_s`` for what is still on its way."""
        self._submit(None)
        if self._thread.ident is not None:
            self._thread.join(self._timeout)
            if self._thread.is_alive():
                self._turn_off(f"it did not finish within {self._timeout:g} s")
        self._on = False

    def _submit(self, job: Callable[[], None] | None) -> bool:
        if not self._on:
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._turn_off(f"{QUEUE_SIZE} entries are waiting, it does not keep up")
            return False
        return True

    def _turn_off(self, reason: object) -> None:
        if self._on:
            self._on = False
            log.warning("wandb is off for the rest of this run: %s", reason)

    def _work(self) -> None:
        # Any exception at all: a third party's service must not decide over the run. It is reported, not hidden.
        try:
            self._connect()
            while self._on and (job := self._jobs.get()) is not None:
                job()
            if self._run is not None:
                self._run.finish()
        except Exception as error:  # noqa: BLE001
            self._turn_off(f"{type(error).__name__}: {error}")

    def _connect(self) -> None:
        if self._client is None:
            import wandb

            self._client = wandb
        if self._mode == "online":
            # Any exception again, for the same reason: what wandb raises without a network differs by version.
            try:
                if self._client.login(prompt=False):
                    self._run = self._init("online")
                    log.info("wandb: %s", self._run.url)
                    return
                reason = "no credentials (set WANDB_API_KEY or run `wandb login`)"
            except Exception as error:  # noqa: BLE001
                reason = f"{type(error).__name__}: {error}"
            if self._fallback == "disabled":
                self._turn_off(reason)
                return
            log.warning("wandb goes on offline, for a later `wandb sync`: %s", reason)
        self._run = self._init("offline")

    def _init(self, mode: Mode) -> Any:
        settings = self._client.Settings(
            init_timeout=self._timeout, finish_timeout=self._timeout, console="off", silent=True, disable_git=True
        )
        return self._client.init(
            mode=mode,
            settings=settings,
            id=_kept_id(self._directory / "wandb_id"),
            resume="allow",
            allow_val_change=True,
            **self._run_settings,
        )

    def _log_table(self, step: int, kind: str, cells: list[list[Any]]) -> None:
        table = self._client.Table(columns=list(ROLLOUT_COLUMNS), data=cells)
        self._run.log({f"rollouts/{kind}": table}, step=step)


def _kept_id(path: Path) -> str:
    """The id in the file, which is made at the first call."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n")
    return path.read_text().strip()
