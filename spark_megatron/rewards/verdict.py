r"""The grammar of verdicts: how the answer to a judge task is read, wherever one is read.

    verdict = the last complete \boxed{..} (or \fbox, \box) of the response, which holds
    content = lead* label gloss?          "Yes"   "(b)"   "Option B"   "\text{A}: Correct"   "**No**, it is wrong"
    lead    = "the", "answer", "is", "option", ...
    gloss   = words around one of "correct", "wrong", ... that says the same as the label

Case, markdown, math marks and punctuation do not count. Whatever is not of this form is no verdict: there is no guess
and no default, and a later box without a verdict takes back an earlier one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from spark_megatron.rewards.protocol import read_box
from spark_megatron.types import Task, Verdict

_LONGEST = 200
"""Characters of a box's content; a verdict has far fewer."""
_MACRO = re.compile(r"\\(?:text|math)(?:[a-z]{2})?\s*\{([^{}]*)\}|\\(?:emph|mbox|boldsymbol|bm)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\[,;:! ]|[~\s]+|\\q?quad\b")
_FOREIGN = re.compile(r"[^\w\s.,;:!?()\[\]{}*\"'`$’‘“”–—-]")
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_BOX = re.compile(r"\\(?:boxed|fbox|box)(?![A-Za-z])")

_LEAD = {
    *("the", "my", "final", "is", "answer", "option", "choice", "letter", "label", "candidate", "response", "solution"),
    *("entry", "statement", "verdict", "judgement", "judgment", "decision"),
}
_FILLER = {
    *("the", "this", "that", "it", "is", "was", "final", "first", "second", "given", "proposed", "above", "shown"),
    *("answer", "solution", "response", "result", "statement", "candidate", "option", "one", "attempt", "work"),
}
_RIGHT = {"correct", "right", "true", "valid", "accurate"}
_WRONG = {"incorrect", "wrong", "false", "invalid", "inaccurate"}
_NOT = {"not", "isn't", "isn’t"}


def read_label(content: str, labels: Sequence[str], glosses: Sequence[bool] = ()) -> str | None:
    """The label that a box's content names, or None where it names none, several, or contradicts itself.

    ``glosses[i]`` is what the words after ``labels[i]`` may say of the answer: True that it is right, False that it is
    wrong (default: right after every label).
    """
    words = _words(content)
    found = {
        label
        for label, says in zip(labels, glosses or (True,) * len(labels), strict=True)
        if (rest := _after(words, _words(label))) is not None and (not rest or _says(rest) is says)
    }
    return found.pop() if len(found) == 1 else None


def label_span(response: str, label: str) -> tuple[int, int] | None:
    """Where, in characters, the label stands inside of the last box that names it; None where none does."""
    spelled = re.compile(rf"(?<![^\W_]){re.escape(label)}(?![^\W_])", re.IGNORECASE)
    for box in reversed(list(_BOX.finditer(response))):
        if (found := spelled.search(response, box.end())) is not None:
            return found.span()
    return None


class ChoiceVerifier:
    r"""Verifier of judge tasks: the last box must hold one of the labels that the task chooses among.

    Those are the task's own ``labels``. ``choices`` lists label sets, such as [["Yes", "No"], ["A", "B"]], for tasks
    from elsewhere that have none: their set is the one with the gold answer. A box with anything else, a label of
    another set included, is ``unparsed``.
    """

    def __init__(self, *, choices: Sequence[Sequence[str]]) -> None:
        folded = [label.casefold() for labels in choices for label in labels]
        if len(set(folded)) != len(folded) or any(len(labels) < 2 for labels in choices):
            raise ValueError(f"choices={[list(c) for c in choices]}: each set needs two or more labels, none repeated")
        self._choices = tuple(tuple(labels) for labels in choices)

    def __call__(self, task: Task, response: str, finish: str) -> Verdict:
        labels = next((labels for labels in (task.labels, *self._choices) if task.answer in labels), None)
        if labels is None:
            known = [list(labels) for labels in (task.labels or (), *self._choices) if labels]
            raise ValueError(f"gold answer {task.answer!r} is no label of choices={known}: add its label set")
        content = read_box(response, finish)
        if isinstance(content, Verdict):
            return content
        polar = task.kind == "judge_one" and len(labels) == 2
        choice = read_label(content, labels, (True, False) if polar else ())
        if choice is None:
            return Verdict("unparsed")
        return Verdict("ok", float(choice == task.answer), choice)


def _words(content: str) -> list[str]:
    """The words in lower case; none where the content is too long or holds a sign that no verdict has."""
    if len(content) > _LONGEST:
        return []
    text, before = unicodedata.normalize("NFKC", content), ""
    while text != before:
        text, before = _MACRO.sub(lambda match: match[1] or match[2] or "", text), text
    text = _SPACE.sub(" ", text)
    return [] if _FOREIGN.search(text) else _WORD.findall(text.casefold())


def _after(words: list[str], label: list[str]) -> list[str] | None:
    """What follows the label where it comes first, but for leading words; None where it does not."""
    for i, word in enumerate(words):
        if label and words[i : i + len(label)] == label:
            return words[i + len(label) :]
        if word not in _LEAD:
            return None
    return None


def _says(words: list[str]) -> bool | None:
    """Whether the words call something right (True) or wrong (False); None where they may say anything else."""
    judged = [word for word in words if word in _RIGHT | _WRONG]
    if len(judged) != 1 or not set(words) <= _FILLER | _RIGHT | _WRONG | _NOT:
        return None
    return (judged[0] in _RIGHT) != bool(_NOT & set(words))
