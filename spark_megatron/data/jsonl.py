"""Tasks from a file with one JSON object a line."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_megatron.data.sources import check_instruction, distinct, solve_task
from spark_megatron.types import Task


class JsonlSource:
    """The questions of a JSON-lines file; a pass is a shuffle of all distinct ones.

    ``question_field`` and ``answer_field`` name the fields. With ``answer_after`` (such as "####", as in GSM8K) the
    gold answer is what follows its last occurrence; null takes the whole field.
    """

    def __init__(
        self,
        *,
        path: str,
        question_field: str,
        answer_field: str,
        answer_after: str | None,
        instruction: str,
        verifier: str,
    ) -> None:
        check_instruction(instruction)
        self._fields, self._after = (question_field, answer_field), answer_after
        self._instruction, self._verifier = instruction, verifier
        self._tasks = distinct([self._task(row, where) for where, row in read_rows(path)])
        tasks = [(task.prompt, task.answer) for task in self._tasks]
        self._fingerprint = hashlib.sha256(repr(tasks).encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def tasks(self, key: str) -> list[Task]:
        """All tasks in the order that ``key`` determines."""
        return random.Random(key).sample(self._tasks, len(self._tasks))

    def _task(self, row: Any, where: str) -> Task:
        question, answer = (text_field(row, field, where) for field in self._fields)
        if self._after is not None:
            _, marker, answer = answer.rpartition(self._after)
            if not marker:
                raise ValueError(f"{where}: answer_after={self._after!r} does not occur in {self._fields[1]!r}")
        if not question.strip() or not answer.strip():
            raise ValueError(f"{where}: the question or the answer is empty")
        return solve_task(question.strip(), answer.strip(), instruction=self._instruction, verifier=self._verifier)


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
