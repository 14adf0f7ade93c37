"""Tasks from the rows of a table."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from spark_megatron.data.rows import Rows
from spark_megatron.data.sources import check_instruction, solve_task
from spark_megatron.types import Task, Turn

_LOG = logging.getLogger(__name__)
_SHOWN = 5
"""How many faulty rows a message lists."""


class TableSource:
    """One task per distinct question of a table; a pass is a shuffle of all.

    ``question_field`` and ``answer_field`` name the fields; a dot leads into a field of fields
    (``reward_model.ground_truth``). A question is a text, or a list of messages (``role``, ``content``) whose last one
    is the user's. An answer is a text, a number, or a mapping (the tests of a program), which is kept as JSON. With
    ``answer_after`` (such as "####", as in GSM8K) the gold answer is what follows its last occurrence; null takes the
    whole field. ``instruction`` is the prompt, with the field ``{question}``; null leaves the question alone.
    ``system`` (null: none) goes before questions without a system message of their own. ``verifier`` is the name of the
    tasks' verifier. Other fields are never looked at.

    Of questions that occur more than once, up to case and spacing, the first is taken, with a warning; what is more,
    where their answers differ. Rows that cannot be read are dropped with a warning, ``max_broken`` of them at most.

    Raises:
        ValueError: more broken rows than that, named by file and line, or no rows.
    """

    def __init__(
        self,
        *,
        rows: Rows,
        question_field: str,
        answer_field: str,
        answer_after: str | None,
        instruction: str | None,
        system: str | None,
        verifier: str,
        max_broken: int,
    ) -> None:
        check_instruction(instruction)
        if max_broken < 0:
            raise ValueError(f"max_broken={max_broken}: must be 0 or more")
        self._fields, self._after = (question_field, answer_field), answer_after
        self._instruction, self._system, self._verifier = instruction, system, verifier
        self._tasks = _first_of_each(self._read(rows, max_broken))
        if not self._tasks:
            raise ValueError(f"rows: there are none in {rows}")
        tasks = [(task.context, task.prompt, task.answer) for task in self._tasks]
        self._fingerprint = hashlib.sha256(repr(tasks).encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def tasks(self, key: str) -> list[Task]:
        """All tasks in the order that ``key`` determines."""
        return random.Random(key).sample(self._tasks, len(self._tasks))

    def _read(self, rows: Rows, max_broken: int) -> list[tuple[str, Task]]:
        found, broken = [], []
        for where, row in rows.read([field for name in self._fields for field in (name, name.split(".")[0])]):
            try:
                found.append((where, self._task(row)))
            except ValueError as error:
                broken.append(f"{where}: {error}")
        told = "; ".join(broken[:_SHOWN]) + ("; ..." if len(broken) > _SHOWN else "")
        if len(broken) > max_broken:
            raise ValueError(f"{told} ({len(broken)} broken rows, and max_broken={max_broken} may be dropped)")
        if broken:
            _LOG.warning("%d broken rows are left out: %s", len(broken), told)
        return found

    def _task(self, row: Any) -> Task:
        if isinstance(row, ValueError):
            raise row
        value, answer = _value(row, self._fields[0]), _answer(_value(row, self._fields[1]), self._fields[1])
        *context, (_, question) = _conversation(value, self._fields[0])
        if self._after is not None:
            _, marker, answer = answer.rpartition(self._after)
            if not marker:
                raise ValueError(f"answer_after={self._after!r} does not occur in {self._fields[1]!r}")
        if not question.strip() or not answer.strip():
            raise ValueError("the question or the answer is empty")
        if self._system is not None and (not context or context[0][0] != "system"):
            context.insert(0, ("system", self._system))
        return solve_task(
            question.strip(), answer.strip(), instruction=self._instruction, verifier=self._verifier, context=context
        )


def _first_of_each(found: Sequence[tuple[str, Task]]) -> list[Task]:
    first: dict[str, tuple[str, Task]] = {}
    repeated: list[str] = []
    differing: list[str] = []
    for where, task in found:
        before, kept = first.setdefault(task.id, (where, task))
        if before != where:
            (repeated if kept.answer == task.answer else differing).append(f"{where} (as {before})")
    for places, what in ((repeated, "repeat a question"), (differing, "repeat a question WITH ANOTHER ANSWER")):
        if places:
            more = ", ..." if len(places) > _SHOWN else ""
            _LOG.warning("%d rows %s and are left out: %s", len(places), what, ", ".join(places[:_SHOWN]) + more)
    return [task for _, task in first.values()]


def _value(row: Any, field: str) -> Any:
    """The field's value, by its full name or step by step."""
    if isinstance(row, Mapping) and field in row:
        return row[field]
    value = row
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"no field {field!r}; the line has {known}")
        value = value[name]
    return value


def _answer(value: Any, field: str) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not isinstance(value, str):
        raise ValueError(f"field {field!r} is neither text nor a number: {value!r}")
    return str(value)


def _conversation(value: Any, field: str) -> list[Turn]:
    if not isinstance(value, list):
        return [("user", _answer(value, field))]
    turns = [_turn(message, f"{field}[{index}]") for index, message in enumerate(value)]
    roles = [role for role, _ in turns]
    if roles[-1:] != ["user"] or "system" in roles[1:]:
        raise ValueError(f"field {field!r} must end with the user's message and have the system's first, not {roles}")
    return turns


def _turn(message: Any, name: str) -> Turn:
    if not isinstance(message, Mapping) or message.get("role") not in ("system", "user", "assistant"):
        raise ValueError(f"{name} must have a role (system, user or assistant) and a content: {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{name}.content is no text: {content!r:.80}")
    return message["role"], content
