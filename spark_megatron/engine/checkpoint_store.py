"""Checkpoint folders on disk: which of them are complete, how one becomes so, and whether its files are whole.

    <folder>/step_00000012/            complete by construction: it gets this name when everything in it is on disk
    <folder>/step_00000014.<n>.partial being written, or left by a run that was killed; never read
    <folder>/latest                    the name of the checkpoint that was completed last

Every change is one rename, after what it names has reached the disk: a process may be killed at any moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

MANIFEST, STATE, INDEX, LATEST = "manifest.json", "state.json", ".metadata", "latest"

_COMPLETE = re.compile(r"step_(\d{8,})(\.old)?")
"""".old" is a checkpoint whose step was saved again, between the two renames that replace it."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read: the message names the file and what to do."""


def digest(file: Path) -> dict[str, Any]:
    """Size and checksum of a file, as they stand in the manifest."""
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def write_durably(file: Path, content: bytes) -> None:
    """Replace a file at once: after a crash it holds the old or the new content, whole."""
    new = file.with_name(f"{file.name}.new")
    with new.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
    _sync(file.parent)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, from the lowest step to the highest."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        match = _COMPLETE.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path  # ".old" sorts behind, so it comes first and counts where it is alone
    return [found[step] for step in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The checkpoint that the pointer names; the one of the highest step where that is gone; None if there is none."""
    candidates = complete(folder)
    pointer = folder / LATEST
    named = folder / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
    if named in candidates:
        return named
    return candidates[-1] if candidates else None


def begin(folder: Path, step: int) -> Path:
    """A new folder to write step ``step`` in. What earlier writers left behind is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = complete(folder)
    for path in folder.iterdir():
        if path.suffix in (".partial", ".old") and path not in whole:
            _remove(path)
    # A name of its own: the writing process of a killed run may still be alive, and must not write into this one.
    partial = folder / f"step_{step:08d}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    return partial


def publish(partial: Path, step: int, digests: dict[str, dict[str, Any]]) -> Path:
    """Make a folder whose files are all on disk, and have these digests, the latest complete checkpoint."""
    write_durably(partial / MANIFEST, json.dumps({"files": digests}, indent=1, sort_keys=True).encode())
    folder = partial.parent
    target = folder / f"step_{step:08d}"
    if target.exists():
        target.rename(target.with_suffix(".old"))
    partial.rename(target)
    _sync(folder)
    write_durably(folder / LATEST, f"{target.name}\n".encode())
    discard(target.with_suffix(".old"))
    return target


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` checkpoints of the highest steps; the latest one always stays."""
    newest = latest(folder)
    for path in complete(folder)[:-keep]:
        if path != newest:
            discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint, if it exists: first its name, so that it never looks complete with files missing."""
    if not path.exists():
        return
    if path.suffix != ".partial":
        path = path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial"))
    _remove(path)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path} could not be removed ({error}); it is tried again at the next save", stacklevel=2)


def state_content(counters: dict[str, Any], state: dict[str, Any]) -> bytes:
    """The state file: the engine's own counters and the caller's state. TypeError where JSON cannot hold it."""
    return json.dumps({"engine": counters, "state": state}).encode()


def read_state(path: Path) -> dict[str, Any]:
    """The caller's state in a checkpoint, without any engine.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    return _read_part(path, "state")


def read_counters(path: Path) -> dict[str, Any]:
    """The engine's counters in a checkpoint."""
    return _read_part(path, "engine")


def _read_part(path: Path, part: str) -> dict[str, Any]:
    _compare(path, _digests(path), [STATE])
    content: dict[str, Any] = _json(path / STATE)[part]
    return content


def verify(path: Path, part: int, parts: int) -> None:
    """Compare one of ``parts`` shares of a checkpoint's files with what was written.

    Raises:
        CheckpointError: a file is missing, or of another size or content.
    """
    digests = _digests(path)
    _compare(path, digests, sorted(digests)[part::parts])


def _digests(path: Path) -> dict[str, Any]:
    digests = _json(path / MANIFEST).get("files")
    if not isinstance(digests, dict) or STATE not in digests:
        raise CheckpointError(f"{path / MANIFEST} is damaged: it lists no {STATE}; {_remedy(path)}")
    return digests


def _compare(path: Path, digests: dict[str, Any], names: list[str]) -> None:
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing: {_remedy(path)}")
        if digest(path / name) != digests[name]:
            raise CheckpointError(f"{path / name} is damaged: it is not what was written; {_remedy(path)}")


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): {_remedy(file.parent)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged: it holds no JSON object; {_remedy(file.parent)}")
    return content


def _remedy(path: Path) -> str:
    return f"resume from another checkpoint in {path.parent}, or delete {path}"
