"""Files with one JSON object a line, and text fields of their rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_rows(path: str) -> list[tuple[str, Any]]:
    """("path:line", value) of every line that is not blank; ValueError for one that is not JSON, or for none at all."""
    rows = []
    # Not splitlines: it also cuts at separators that JSON allows inside a string.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                rows.append((f"{path}:{number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
    if not rows:
        raise ValueError(f"{path}: has no lines")
    return rows


def text_field(row: Any, field: str, where: str) -> str:
    """A field of a row as text; ValueError where it is missing or neither text nor a number."""
    if not isinstance(row, Mapping) or field not in row:
        known = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where}: no field {field!r}; the line has {known}")
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{where}: field {field!r} is neither text nor a number: {value!r}")
    return str(value)
