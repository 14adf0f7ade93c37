"""The wandb sink with the real client offline, and with clients that fail or hang."""

import logging
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from spark_megatron.tracking.wandb_sink import WandbSink

ROW = {
    "prompt": "1+1?",
    "answer": "2",
    "rollouts": [{"text": "two", "reward": 1.0, "status": "ok", "parsed": "2", "length": 3, "finish": "stop"}],
}


def open_sink(directory: Path, **changes: Any) -> WandbSink:
    settings: dict[str, Any] = {
        "project": "p",
        "name": "n",
        "mode": "offline",
        "fallback": "disabled",
        "directory": directory,
        "timeout_s": 60.0,
    }
    return WandbSink(**{**settings, **changes})


def history(directory: Path) -> list[dict[str, str]]:
    """What the run file of the real client holds, as {name: json}."""
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in leveldb_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
    return rows


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB of (checksum, length, type) + fragment, after a 7-byte header."""
    position, record = 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield record
            record = b""


class Run:
    """A run that notes what it gets, and raises or blocks on demand."""

    url = "nowhere"

    def __init__(self, error: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.error, self.gate = error, gate
        self.logged: list[dict[str, float]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.error is not None:
            raise self.error
        self.logged.append(values)

    def finish(self) -> None:
        pass


class Client:
    """Stands for the wandb module: whether there are credentials, what init gives per mode."""

    Settings = SimpleNamespace

    def __init__(self, run: Run, logged_in: bool = True, init_error: Exception | None = None) -> None:
        self.run, self.logged_in, self.init_error = run, logged_in, init_error
        self.modes: list[str] = []
        self.started: list[dict[str, Any]] = []

    def login(self, prompt: bool) -> bool:
        assert not prompt  # a question on the terminal would stall the run
        return self.logged_in

    def init(self, mode: str, **settings: Any) -> Run:
        self.modes.append(mode)
        self.started.append(settings)
        if self.init_error is not None and mode == "online":
            raise self.init_error
        return self.run


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_online_with_credentials(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = Client(Run())
    sink = open_sink(tmp_path, mode="online", client=client)
    sink.log(1, {"x": 1.0})
    sink.close()
    assert (client.modes, client.run.logged, warnings(caplog)) == (["online"], [{"x": 1.0}], [])


@pytest.mark.parametrize(
    ("logged_in", "error", "reason"),
    [(False, None, "no credentials"), (True, ConnectionError("no route"), "ConnectionError: no route")],
)
@pytest.mark.parametrize(("fallback", "logged"), [("offline", [{"x": 1.0}]), ("disabled", [])])
def test_without_key_or_network_it_falls_back_as_set(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    logged_in: bool,
    error: Exception | None,
    reason: str,
    fallback: str,
    logged: list[dict[str, float]],
) -> None:
    client = Client(Run(), logged_in=logged_in, init_error=error)
    sink = open_sink(tmp_path, mode="online", fallback=fallback, client=client)
    sink.log(1, {"x": 1.0})
    sink.close()
    assert client.run.logged == logged
    (warning,) = warnings(caplog)
    assert reason in warning
    assert ("offline" in client.modes) == (fallback == "offline")


def test_a_failing_client_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = open_sink(tmp_path, client=Client(Run(error=RuntimeError("disk full"))))
    for step in range(5):
        sink.log(step, {"x": 1.0})
    sink.close()
    sink.log(6, {"x": 1.0})
    assert not sink.on
    assert warnings(caplog) == ["wandb is off for the rest of this run: RuntimeError: disk full"]


def test_a_hanging_client_stalls_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    sink = open_sink(tmp_path, client=Client(Run(gate=gate)), timeout_s=0.05)
    sink.log(1, {"x": 1.0})
    sink.close()
    gate.set()
    assert warnings(caplog) == ["wandb is off for the rest of this run: it did not finish within 0.05 s"]


def test_a_client_that_does_not_keep_up_is_turned_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_megatron.tracking.wandb_sink.QUEUE_SIZE", 3)
    gate = threading.Event()
    sink = open_sink(tmp_path, client=Client(Run(gate=gate)))
    for step in range(10):
        sink.log(step, {"x": 1.0})
    assert not sink.on
    gate.set()
    assert warnings(caplog) == ["wandb is off for the rest of this run: 3 entries are waiting, it does not keep up"]


def test_a_later_sink_in_the_same_directory_continues_the_run(tmp_path: Path) -> None:
    """With settings that changed since, which wandb refuses unless it is told to accept them."""
    ids = []
    for directory, seed in (("a", 0), ("a", 1), ("b", 0)):
        client = Client(Run())
        sink = open_sink(tmp_path / directory, mode="online", client=client, config={"seed": seed})
        sink.close()
        (settings,) = client.started
        assert (settings["resume"], settings["allow_val_change"]) == ("allow", True)
        assert settings["config"] == {"seed": seed}
        ids.append(settings["id"])
    assert ids[0] == ids[1] != ids[2]


def test_offline_parts_of_a_run_share_its_id(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = open_sink(tmp_path)
        sink.log(step, {"x": float(step)})
        sink.close()
    kept = (tmp_path / "wandb_id").read_text().strip()
    parts = list(tmp_path.glob("wandb/offline-run-*"))
    assert parts
    # offline-run-<second>-<id>, and a number where two begin in the same second
    assert {part.name.split("-")[3] for part in parts} == {kept}


def test_disabled_does_nothing_at_all(tmp_path: Path) -> None:
    client = Client(Run())
    sink = open_sink(tmp_path / "run", mode="disabled", client=client)
    sink.log(1, {"x": 1.0})
    sink.record(1, "solve", [ROW])
    sink.close()
    assert client.modes == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["mode", "fallback"])
def test_refuses_unknown_settings(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ValueError, match=rf"wandb\.{setting}='dryrun' is unknown"):
        open_sink(tmp_path, **{setting: "dryrun"})
