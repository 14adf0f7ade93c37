"""What the model really wrote: groups of rollouts with their verdicts, as one JSON line per group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from spark_megatron.tracking.jsonl import JsonlWriter
from spark_megatron.types import Group, Task


class Recorder:
    """Writes ``rollouts.jsonl`` at ``path``.

    ``groups`` is how many groups to keep per step and task kind: "all" or a number (0 keeps none). A number keeps the
    first ones in the order in which they come, so that what is kept says nothing about how well they did.
    Raises ValueError for any other setting.
    """

    def __init__(self, *, path: str | Path, groups: Literal["all"] | int) -> None:
        if groups != "all" and (isinstance(groups, (bool, str)) or groups < 0):
            raise ValueError(f"recorder.groups={groups!r} is not a number of groups; set 'all', 0 or more")
        self._limit = groups
        self._writer = JsonlWriter(Path(path))
        self._step: int | None = None
        self._kept: dict[str, int] = defaultdict(int)

    def record(self, step: int, groups: Iterable[Group]) -> dict[str, list[dict[str, Any]]]:
        """Write the groups of ``step`` that the setting keeps and return them as rows, by task kind.

        Several calls within one step (its periods) share the limit.
        """
        if step != self._step:
            self._step = step
            self._kept.clear()
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for group in groups:
            kind = group.task.kind
            if self._limit == "all" or self._kept[kind] < self._limit:
                self._kept[kind] += 1
                rows[kind].append(group_row(step, group))
        for row in (row for of_kind in rows.values() for row in of_kind):
            self._writer.write(row)
        return dict(rows)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def group_row(step: int, group: Group) -> dict[str, Any]:
    """One checked group as plain data: the task, then per rollout its text, verdict and length in tokens.

    ``weight_version`` is that of the group's oldest rollout. Raises ValueError for a group that was not checked.
    """
    if len(group.verdicts) != len(group.rollouts):
        raise ValueError(f"group {group.task.id!r} cannot be recorded: it has no verdict for each rollout")
    versions = [r.weight_version for r in group.rollouts]
    return {
        "step": step,
        **_task_row(group.task),
        "weight_version": min(versions, default=None),
        "rollouts": [
            {
                "text": rollout.text,
                "reward": verdict.reward,
                "status": verdict.status,
                "parsed": verdict.parsed,
                "finish": rollout.finish,
                "length": len(rollout.tokens),
                **({"flipped": True} if verdict.flipped else {}),
            }
            for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
        ],
    }


def _task_row(task: Task) -> dict[str, Any]:
    return {"kind": task.kind, "id": task.id, "source": task.source, "prompt": task.prompt, "answer": task.answer}
