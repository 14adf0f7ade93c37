"""The grammar of verdicts: how the answer to a judge task is read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spark_megatron.rewards.protocol import read_box
from spark_megatron.types import Task, Verdict

_TEXT_MACRO = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{(.*)\}", re.DOTALL)
_AROUND = " \t\r\n.,;:!?()[]{}*_\"'`$"


def parse_choice(content: str, labels: Sequence[str]) -> str | None:
    """The label that a box's content names, or None.

    Case, surrounding space and punctuation and a ``\\text{}`` around the label are tolerated; anything more is not.
    """
    macro = _TEXT_MACRO.fullmatch(content.strip(" \t\r\n.*$"))
    word = (macro[1] if macro else content).strip(_AROUND).casefold()
    return next((label for label in labels if label.casefold() == word), None)


class ChoiceVerifier:
    r"""Verifier of judge tasks: the last ``\boxed{}`` must hold one of the labels the task chooses among.

    ``choices`` lists the label sets, such as [["Yes", "No"], ["A", "B"]]; the task's set is the one with its gold
    answer. A box with anything else, a label of another set included, is ``unparsed``.
    """

    def __init__(self, *, choices: Sequence[Sequence[str]]) -> None:
        folded = [label.casefold() for labels in choices for label in labels]
        if len(set(folded)) != len(folded) or any(len(labels) < 2 for labels in choices):
            raise ValueError(f"choices={[list(c) for c in choices]}: each set needs two or more labels, none repeated")
        self._choices = tuple(tuple(labels) for labels in choices)

    def __call__(self, task: Task, response: str, finish: str) -> Verdict:
        labels = next((labels for labels in self._choices if task.answer in labels), None)
        if labels is None:
            known = [list(labels) for labels in self._choices]
            raise ValueError(f"gold answer {task.answer!r} is no label of choices={known}: add its label set")
        content = read_box(response, finish)
        if isinstance(content, Verdict):
            return content
        choice = parse_choice(content, labels)
        if choice is None:
            return Verdict("unparsed")
        return Verdict("ok", float(choice == task.answer), choice)
