"""JSON lines that survive a kill: every row is one flushed write, and a torn last line is repaired or ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def jsonable(value: Any) -> Any:
    """``value`` with NaN and infinities as None, arrays as lists and array scalars as numbers.

    Raises ValueError for anything else that JSON has no form for.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    raise ValueError(f"cannot write a {type(value).__name__} to a jsonl file; pass numbers, texts, lists or mappings")


class JsonlWriter:
    """Appends rows to ``path``. A line that a killed run left unfinished is cut off first, or it would spoil the next.

    Each row is on its way to the file system when ``write`` returns (flushed, not synced to the disk).
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair_tail(path)
        # A lone surrogate, which UTF-8 cannot hold, becomes \udXXX: just what JSON writes for it.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; raises ValueError for a value that JSON has no form for."""
        self._file.write(json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of ``path``, one at a time. A broken *last* line (the run was killed in mid-write) is left out.

    Raises ValueError, with the line number, for a broken line before the last or a line that is not an object.
    """
    broken: str | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if broken is not None:
                raise ValueError(broken)
            if not line.strip():
                continue
            row = _parse(line)
            if row is None:
                broken = f"{path}: line {number} is not a JSON object; repair or remove that line"
            else:
                yield row


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The one row per step of a metrics file, by ascending step.

    A resumed run repeats the steps after its last checkpoint: once the step goes back, the older rows from there on
    describe weights that no longer exist, and the newer rows replace them.
    """
    kept: list[dict[str, Any]] = []
    for row in read_jsonl(path):
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def cut(path: Path, step: int) -> None:
    """Remove the rows of steps after ``step``, which a run that goes on from there writes again. Steps must ascend."""
    if not path.exists():
        return
    end = 0
    with path.open("rb+") as file:
        for line in file:
            row = _parse(line)
            if row is not None and row.get("step", 0) > step:
                break
            end += len(line)
        file.truncate(end)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # covers JSON errors and a multi-byte character that was cut
        return None
    return row if isinstance(row, dict) else None


def _repair_tail(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, 2)
        tail = b""
        position = end
        while position > 0 and b"\n" not in tail:
            step = min(position, 1 << 16)
            position -= step
            file.seek(position)
            tail = file.read(step) + tail
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if _parse(last) is not None:
            file.seek(end)
            file.write(b"\n")
        else:
            file.truncate(end - len(last))
