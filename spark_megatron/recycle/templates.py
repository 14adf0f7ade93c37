"""Banks of prompt templates, and the safe filling of their fields."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml  # type: ignore[import-untyped,unused-ignore]

from spark_megatron.recycle.candidates import Candidate

View = Literal["answer", "cot", "both"]
"""What of a solution is shown: the final answer, the whole text, or both."""
VIEWS: tuple[View, ...] = get_args(View)

_FIELD = re.compile(r"\{([a-z_]+)\}")
_FIELDS = {"judge_one": {"question", "shown"}, "judge_pair": {"question", "a", "b"}, "reflect": {"question", "shown"}}
_LAYOUT_FIELDS = {"answer": {"answer"}, "cot": {"text"}, "both": {"answer", "text"}}


@dataclass(frozen=True)
class Template:
    """One wording. ``labels`` are the words for right and wrong (pointwise) or for the first and the second answer."""

    text: str
    labels: tuple[str, ...] = ()
    told_wrong: bool = False
    """Whether the text says that the shown solution is wrong."""


@dataclass(frozen=True)
class Part:
    """The templates of one kind, and how each view lays out a candidate inside them."""

    layouts: Mapping[View, str]
    templates: tuple[Template, ...]

    def draw(self, rng: random.Random, *, allow_told_wrong: bool = True) -> Template:
        """A template drawn uniformly, of those that do not tell the solution is wrong unless that is allowed."""
        return rng.choice([t for t in self.templates if allow_told_wrong or not t.told_wrong])

    def show(self, candidate: Candidate, view: View) -> str:
        """The candidate laid out for ``view``. Raises ValueError when an answer is asked for and there is none."""
        if candidate.answer is None and view != "cot":
            raise ValueError(f"view {view!r} needs a final answer, and the solution has none: {candidate.text[:80]!r}")
        return fill(self.layouts[view], {"answer": candidate.answer or "", "text": candidate.text})


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
    """A bank from yaml text; ``origin`` names it in errors."""
    raw = yaml.safe_load(text)
    if not isinstance(raw, dict) or set(raw) != set(_FIELDS):
        raise ValueError(f"{origin}: a bank has exactly the entries {sorted(_FIELDS)}")
    return Bank(**{kind: _part(kind, raw[kind], f"{origin}: {kind}") for kind in _FIELDS})


def _part(kind: str, raw: Any, where: str) -> Part:
    if not isinstance(raw, dict) or set(raw) != {"layouts", "templates"} or set(raw["layouts"]) != set(VIEWS):
        raise ValueError(f"{where}: needs 'templates' and 'layouts' with the views {list(VIEWS)}")
    for view, layout in raw["layouts"].items():
        _require_fields(layout, _LAYOUT_FIELDS[view], f"{where}.layouts.{view}")
    templates = tuple(
        _template(kind, entry, f"{where}.templates[{index}]") for index, entry in enumerate(raw["templates"])
    )
    if all(template.told_wrong for template in templates):
        raise ValueError(f"{where}: at least one template must not be told_wrong")
    return Part(raw["layouts"], templates)


def _template(kind: str, raw: Any, where: str) -> Template:
    allowed = {"text", "told_wrong"} if kind == "reflect" else {"text", "labels"}
    if not isinstance(raw, dict) or "text" not in raw or not set(raw) <= allowed:
        raise ValueError(f"{where}: got {raw!r}; a template is a mapping with 'text' and of {sorted(allowed)}")
    labels = tuple(raw.get("labels", ()))
    if kind != "reflect" and not (len(set(labels)) == 2 and all(isinstance(label, str) for label in labels)):
        raise ValueError(f"{where}: labels={list(labels)}; give two different ones, quoted (Yes and No are booleans)")
    _require_fields(raw["text"], _FIELDS[kind], where)
    if "\\boxed{}" not in raw["text"]:
        raise ValueError(f"{where}: the text must ask for the answer in \\boxed{{}}, which is all the verifier reads")
    return Template(raw["text"].rstrip("\n"), labels, bool(raw.get("told_wrong", False)))


def _require_fields(text: str, expected: set[str], where: str) -> None:
    found = set(_FIELD.findall(text))
    if found != expected:
        raise ValueError(f"{where}: has the fields {sorted(found)}, must have {sorted(expected)}")
