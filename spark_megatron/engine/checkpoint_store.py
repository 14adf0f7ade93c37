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


def publish(partial: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Make a folder whose files are all on disk the latest complete checkpoint."""
    write_durably(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
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


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    manifest = _json(path / MANIFEST)
    if not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{path / MANIFEST} lists no files: {_remedy(path)}")
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """The caller's state in a checkpoint, without any engine.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    for problem in problems(path, read_manifest(path), [STATE]):
        raise CheckpointError(problem)
    return _json(path / STATE)


def problems(path: Path, manifest: dict[str, Any], names: list[str]) -> list[str]:
    """What is wrong with some files of a checkpoint: missing, of another size or of other content than written."""
    found = []
    for name in names:
        written = manifest["files"].get(name)
        if not (path / name).is_file() or written is None:
            found.append(f"{path / name} is missing: {_remedy(path)}")
        elif digest(path / name) != written:
            found.append(f"{path / name} is damaged: it is not what was written; {_remedy(path)}")
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): {_remedy(file.parent)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object: {_remedy(file.parent)}")
    return content


def _remedy(path: Path) -> str:
    return f"resume from another checkpoint in {path.parent}, or delete {path}"
