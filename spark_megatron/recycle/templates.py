"""Banks of prompt templates, and the safe filling of their fields.

What a template shows (a question, a candidate's text) stands between tags such as ``<answer>`` and ``</answer>``, and a
shown text that holds such a tag itself has it made harmless: nothing in it can end its own region of the prompt.
"""

from __future__ import annotations

import difflib
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml  # type: ignore[import-untyped,unused-ignore]

from spark_megatron.recycle.candidates import Candidate
from spark_megatron.rewards.verdict import read_label

View = Literal["answer", "cot", "both"]
"""What of a solution is shown: the final answer, the whole text, or both."""
VIEWS: tuple[View, ...] = get_args(View)

_FIELD = re.compile(r"\{([a-z_]+)\}")
_FIELDS = {"judge_one": {"question", "shown"}, "judge_pair": {"question", "a", "b"}, "reflect": {"question", "shown"}}
_LAYOUT_FIELDS = {"answer": {"answer"}, "cot": {"text"}, "both": {"answer", "text"}}
_TAG = re.compile(r"</?([a-z_]+)>")


@dataclass(frozen=True)
class Template:
    """One wording. ``labels`` are the words for right and wrong (pointwise) or for the first and the second answer.

    ``layouts`` say how a candidate is laid out for each view; the wording itself is made for ``views``.
    """

    text: str
    layouts: Mapping[View, str]
    labels: tuple[str, ...] = ()
    told_wrong: bool = False
    """Whether the text says that the shown solution is wrong."""
    views: tuple[View, ...] = VIEWS

    def show(self, candidate: Candidate, view: View) -> str:
        """The candidate laid out for ``view``. Raises ValueError when an answer is asked for and there is none."""
        if candidate.answer is None and view != "cot":
            raise ValueError(f"view {view!r} needs a final answer, and the solution has none: {candidate.text[:80]!r}")
        return fill(self.layouts[view], {"answer": candidate.answer or "", "text": candidate.text})

    @property
    def tags(self) -> list[str]:
        """The names of the tags between which this template shows things."""
        return sorted(set(_TAG.findall(self.text)))

    def prompt(self, fields: Mapping[str, str]) -> str:
        """The text with its fields filled in; tags of this template inside of the values are made harmless."""
        return fill(self.text, {name: _without_tags(value, self.tags) for name, value in fields.items()})


@dataclass(frozen=True)
class Part:
    """The templates of one kind."""

    templates: tuple[Template, ...]

    def options(self, view: View, *, allow_told_wrong: bool = True) -> list[Template]:
        """Those made for ``view``, without those that call the solution wrong unless that is allowed."""
        return [t for t in self.templates if view in t.views and (allow_told_wrong or not t.told_wrong)]

    def draw(self, rng: random.Random, view: View, *, allow_told_wrong: bool = True) -> Template:
        """One of the options, drawn uniformly."""
        return rng.choice(self.options(view, allow_told_wrong=allow_told_wrong))

    def deal(self, n: int, rng: random.Random, view: View, *, allow_told_wrong: bool = True) -> list[Template]:
        """``n`` options in random order, the same again and again: how often each comes differs by at most one."""
        options = self.options(view, allow_told_wrong=allow_told_wrong)
        order = rng.sample(options, len(options))
        return [order[i % len(order)] for i in range(n)]


@dataclass(frozen=True)
class Bank:
    """Templates of all recycled kinds."""

    judge_one: Part
    judge_pair: Part
    reflect: Part


def fill(template: str, fields: Mapping[str, str]) -> str:
    r"""``template`` with each ``{name}`` of ``fields`` replaced, in one pass: braces inside the values are just text.

    Anything else in braces, ``\boxed{}`` included, stays as it is.
    """
    return _FIELD.sub(lambda match: fields.get(match[1], match[0]), template)


def _without_tags(text: str, names: list[str]) -> str:
    """``text`` with the "<" of every opening or closing tag of these names, however it is spelled, as "&lt;"."""
    if not names:
        return text
    return re.sub(rf"<(?=\s*/?\s*(?:{'|'.join(names)})(?![a-z_]))", "&lt;", text, flags=re.IGNORECASE)


def load_bank(name: str) -> Bank:
    """The bank of that name in this package, or the one in a yaml file when ``name`` ends in .yaml.

    Raises ValueError with the file, the entry and the fault when a bank does not hold together.
    """
    if name.endswith((".yaml", ".yml")):
        return parse_bank(Path(name).read_text(encoding="utf-8"), name)
    folder = resources.files("spark_megatron.recycle") / "templates"
    known = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ValueError(f"unknown template bank {name!r}; nearest of {known}: {near[0]!r}; or give a .yaml file")
    return parse_bank((folder / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")


def parse_bank(text: str, origin: str) -> Bank:
    """A bank from yaml text; ``origin`` names it in errors.

    It says with ``fenced`` whether each field stands between tags of its own. Only a bank for models that know no tags
    has a reason not to.
    """
    raw = yaml.safe_load(text)
    if not isinstance(raw, dict) or set(raw) != {*_FIELDS, "fenced"} or not isinstance(raw["fenced"], bool):
        raise ValueError(f"{origin}: a bank has exactly the entries {sorted(_FIELDS)} and fenced: true or false")
    return Bank(**{kind: _part(kind, raw[kind], raw["fenced"], f"{origin}: {kind}") for kind in _FIELDS})


def _part(kind: str, raw: Any, fenced: bool, where: str) -> Part:
    if not isinstance(raw, dict) or set(raw) != {"layouts", "templates"} or set(raw["layouts"]) != set(VIEWS):
        raise ValueError(f"{where}: needs 'templates' and 'layouts' with the views {list(VIEWS)}")
    for view, layout in raw["layouts"].items():
        _require_fields(layout, _LAYOUT_FIELDS[view], f"{where}.layouts.{view}")
    templates = tuple(
        _template(kind, entry, raw["layouts"], fenced, f"{where}.templates[{index}]")
        for index, entry in enumerate(raw["templates"])
    )
    part = Part(templates)
    needed: tuple[View, ...] = ("answer", "cot") if kind == "reflect" else VIEWS
    lacking = [view for view in needed if not part.options(view, allow_told_wrong=False)]
    if lacking:
        raise ValueError(f"{where}: at least one template for each of the views {lacking} must not be told_wrong")
    spelled = Counter(" ".join(template.text.split()) for template in templates)
    (often, count), *_ = spelled.most_common(1)
    if count > 1:
        raise ValueError(f"{where}: {count} templates have the same text: {often[:80]!r}...")
    return part


def _template(kind: str, raw: Any, layouts: Mapping[View, str], fenced: bool, where: str) -> Template:
    allowed = {"text", "told_wrong", "views"} if kind == "reflect" else {"text", "labels"}
    if not isinstance(raw, dict) or "text" not in raw or not set(raw) <= allowed:
        raise ValueError(f"{where}: got {raw!r}; a template is a mapping with 'text' and of {sorted(allowed)}")
    labels, views = tuple(raw.get("labels", ())), tuple(raw.get("views", VIEWS))
    if kind != "reflect":
        _require_labels(labels, where)
    if not views or not set(views) <= set(VIEWS):
        raise ValueError(f"{where}: views={list(views)}; give some of {list(VIEWS)}, or leave it out for all")
    _require_fields(raw["text"], _FIELDS[kind], where)
    if "\\boxed{}" not in raw["text"] or re.search(r"\\f?box(?!ed\{\})", raw["text"]):
        raise ValueError(f"{where}: the text must ask for the answer in \\boxed{{}}, and in no other form of a box")
    bare = [
        name for name in sorted(_FIELDS[kind]) if not re.search(rf"<([a-z_]+)>\n?\{{{name}\}}\n?</\1>", raw["text"])
    ]
    if fenced and bare:
        raise ValueError(
            f"{where}: {{{bare[0]}}} must stand between tags, as in <tag>{{{bare[0]}}}</tag> (fenced: true)"
        )
    return Template(raw["text"].rstrip("\n"), layouts, labels, bool(raw.get("told_wrong", False)), views)


def _require_labels(labels: tuple[Any, ...], where: str) -> None:
    """Two labels that the grammar of verdicts reads as themselves."""
    if len(set(labels)) != 2 or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"{where}: labels={list(labels)}; give two different ones, quoted (Yes and No are booleans)")
    for label in labels:
        if read_label(label, labels) != label:
            raise ValueError(f"{where}: labels={list(labels)}: {label!r} in a box would not be read as that label")


def _require_fields(text: str, expected: set[str], where: str) -> None:
    found = sorted(_FIELD.findall(text))
    if found != sorted(expected):
        raise ValueError(f"{where}: has the fields {found}, must have {sorted(expected)}, once each")
