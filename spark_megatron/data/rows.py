"""Rows of tables: JSON lines, parquet, and datasets of the Hugging Face library, saved to disk or from its hub.

The libraries of the formats are loaded when a file of theirs is read, not before.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")

Row = tuple[str, Any]
"""Where a row is ("file:line", counted from 1), and what it holds: a mapping, or a ValueError where it has no form."""


class Rows(Protocol):
    """A table that can be read again and again."""

    def read(self, fields: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with at least those of the ``fields`` that there are."""
        ...


class Files:
    """The rows of one or many files, in their order.

    A path names a file of JSON lines (.jsonl, .ndjson), of one JSON list (.json), a parquet file, or a directory that
    ``save_to_disk`` of the Hugging Face library has written. ``*`` stands for any name; such files come sorted. A slice
    at the end takes a part of each file: ``train.jsonl@[:1000]``, ``train.jsonl@[-100:]``.
    """

    def __init__(self, *, paths: str | list[str]) -> None:
        listed = [paths] if isinstance(paths, str) else list(paths)
        if not listed:
            raise ValueError("paths=[]: name at least one file")
        self._files = [file for path in listed for file in _files(str(path))]

    def read(self, fields: Sequence[str]) -> Iterator[Row]:
        """All rows of all files."""
        for path, part in self._files:
            rows = _read_file(path, fields)
            yield from rows if part == slice(None) else list(rows)[part]


class Hub:
    """A dataset of the Hugging Face hub (or its cache, or a directory of data files): ``subset`` may be null.

    ``split`` can have a slice in the library's own form, such as "train[:1000]".
    """

    def __init__(self, *, name: str, subset: str | None, split: str) -> None:
        self._name, self._subset, self._split = name, subset, split

    def read(self, fields: Sequence[str]) -> Iterator[Row]:
        """All rows of the split; raises ValueError where the hub or the dataset cannot be reached."""
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError

        try:
            found = load_dataset(self._name, self._subset, split=self._split)
        except (OSError, ValueError, DatasetsError) as error:
            setting = f"rows.name={self._name!r} (subset={self._subset!r}, split={self._split!r})"
            raise ValueError(f"{setting} could not be loaded: {error}") from error
        yield from _numbered(f"{self._name}[{self._split}]", _selected(found, fields))


def _files(path: str) -> list[tuple[Path, slice]]:
    sliced = _SLICED.fullmatch(path)
    name, part = path, slice(None)
    if sliced:
        name = sliced["path"]
        part = slice(*(int(bound) if bound else None for bound in (sliced["start"], sliced["stop"])))
    found = sorted(glob.glob(name, recursive=True)) if "*" in name else [name]
    if not found or not all(Path(file).exists() for file in found):
        raise ValueError(f"paths={name!r}: there is no such file or directory")
    return [(Path(file), part) for file in found]


def _read_file(path: Path, fields: Sequence[str]) -> Iterable[Row]:
    if path.is_dir():
        return _numbered(str(path), _saved(path, fields))
    if path.suffix in (".jsonl", ".ndjson"):
        return _json_lines(path)
    if path.suffix == ".json":
        return _json_list(path)
    if path.suffix == ".parquet":
        return _numbered(str(path), _parquet(path, fields))
    raise ValueError(f"rows.paths={path}: is neither .jsonl, .json nor .parquet, nor a directory of save_to_disk")


def _numbered(name: str, rows: Iterable[Any]) -> Iterator[Row]:
    return ((f"{name}:{number}", row) for number, row in enumerate(rows, start=1))


def _json_lines(path: Path) -> Iterator[Row]:
    # Not by text lines: they also end at separators that JSON allows inside of a string.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _parsed(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}")


def _json_list(path: Path) -> Iterator[Row]:
    found = _parsed(path.read_bytes())
    if not isinstance(found, list):
        raise ValueError(f"rows.paths={path}: is no JSON list; give a file with one object a line the ending .jsonl")
    return _numbered(str(path), found)


def _parquet(path: Path, fields: Sequence[str]) -> Iterator[Any]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"rows.paths={path}: is no parquet file: {error}") from error
    with file:
        columns = [name for name in file.schema_arrow.names if name in fields]
        for batch in file.iter_batches(columns=columns):
            yield from batch.to_pylist() if columns else [{}] * batch.num_rows


def _saved(path: Path, fields: Sequence[str]) -> Iterator[Any]:
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"rows.paths={path}: was not written by save_to_disk: {error}") from error
    if isinstance(found, DatasetDict):
        raise ValueError(
            f"rows.paths={path}: has the splits {sorted(found)}: name one, such as {path / next(iter(found))}"
        )
    return _selected(found, fields)


def _selected(found: Any, fields: Sequence[str]) -> Iterator[Any]:
    columns = [name for name in found.column_names if name in fields]
    return iter(found.select_columns(columns)) if columns else iter([{}] * len(found))
