"""Checkpoint folders: a process may be killed at any moment, and the last complete one is found."""

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.engine import checkpoint_store as store

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""The events of a process' audit before it changes a folder, beside the opening of a file to write."""


def save(folder: Path, step: int, content: Any, keep: int = 1) -> None:
    """A checkpoint with one file beside the state."""
    partial = store.begin(folder, step)
    (partial / "data").write_text(str(content))
    store.write_durably(partial / store.STATE, store.state_content({}, {"content": content}))
    store.publish(partial, step, {name: store.digest(partial / name) for name in ("data", store.STATE)})
    store.prune(folder, keep)


def content(path: Path | None) -> Any:
    """What the checkpoint holds, which must be whole."""
    if path is None:
        return None
    store.verify(path, 0, 1)
    return store.read_state(path)["content"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed_before(change: int, action: Callable[[], None]) -> bool:
    """Run ``action`` in a fork that is killed before its n-th change; False if it made fewer."""
    pid = os.fork()
    if pid == 0:
        left = itertools.count(change, -1)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if (event in CHANGES or writes) and next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            action()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("before", "step", "keep"),
    [([], 1, 1), ([1], 2, 1), ([1, 2], 3, 2), ([1], 1, 1), ([1, 2], 1, 2), ([3], 2, 1)],
    ids=["first", "next", "third", "same again", "older again", "out of order"],
)
def test_killed_before_any_change(tmp_path: Path, before: list[int], step: int, keep: int) -> None:
    """What is latest is then the one before or the new one, whole; the next save clears up."""
    for change in itertools.count():
        folder = tmp_path / str(change)
        for earlier in before:
            save(folder, earlier, f"old {earlier}", keep)
        old = content(store.latest(folder))
        killed = killed_before(change, lambda folder=folder: save(folder, step, "new", keep))
        assert content(store.latest(folder)) in ([old, "new"] if killed else ["new"])
        assert all(content(path) for path in store.complete(folder))
        save(folder, step, "again", keep)
        assert content(store.latest(folder)) == "again"
        stay = sorted({*before, step})[-keep:]
        assert names(folder) == ["latest", *(f"step_{s:08d}" for s in sorted({*stay, step}))]
        if not killed:
            assert change >= 10
            break


def test_the_pointer_names_the_latest(tmp_path: Path) -> None:
    for step in (2, 10, 100_000_000):
        save(tmp_path, step, step, keep=3)
    assert [content(path) for path in store.complete(tmp_path)] == [2, 10, 100_000_000]
    assert (tmp_path / "latest").read_text() == "step_100000000\n"
    (tmp_path / "latest").write_text("step_00000010\n")
    assert content(store.latest(tmp_path)) == 10


@pytest.mark.parametrize("pointer", [None, "", "step_00000007\n", "../elsewhere", "latest", "step_00000009.ab.partial"])
def test_without_a_good_pointer_the_highest_step_counts(tmp_path: Path, pointer: str | None) -> None:
    for step in (1, 2):
        save(tmp_path, step, step, keep=2)
    store.begin(tmp_path, 9)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    assert content(store.latest(tmp_path)) == 2


def test_steps_saved_out_of_order_stay_sorted(tmp_path: Path) -> None:
    """The highest steps stay, and beside them the one that was just saved."""
    for step in (5, 20, 10):
        save(tmp_path, step, step, keep=2)
    assert [content(path) for path in store.complete(tmp_path)] == [10, 20]
    save(tmp_path, 7, 7, keep=2)
    assert [content(path) for path in store.complete(tmp_path)] == [7, 10, 20]
    assert content(store.latest(tmp_path)) == 7
    save(tmp_path, 30, 30, keep=2)
    assert [content(path) for path in store.complete(tmp_path)] == [20, 30]


def test_a_folder_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It no longer counts, and goes at the next save."""
    save(tmp_path, 1, 1)
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError(16, "Device or resource busy")))
        with pytest.warns(UserWarning, match=r"step_00000001\..*partial could not be removed \(.*busy\)"):
            save(tmp_path, 2, 2)
    assert [content(path) for path in store.complete(tmp_path)] == [2]
    save(tmp_path, 3, 3)
    assert names(tmp_path) == ["latest", "step_00000003"]


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    for change in itertools.count():
        killed = killed_before(change, lambda: store.write_durably(file, b"new"))
        assert file.read_bytes() == (b"old" if killed and change < 2 else b"new")
        if not killed:
            break


@pytest.mark.parametrize("text", ["[]", '{"files": []}', '{"files": {}}', "no json"])
def test_a_manifest_without_sense_is_damage(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1, 1)
    path = tmp_path / "step_00000001"
    (path / store.MANIFEST).write_text(text)
    with pytest.raises(store.CheckpointError, match=f"{path}/manifest.json .*or delete {path}"):
        store.read_state(path)
