"""From plain values to typed dataclasses, with messages that name the setting, its value and the nearest name."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting that cannot work: the message names it, its value and the fix."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a message, "; did you mean X?", with the closest of the valid (dotted) names, or a list of them.

    The same last part in another group comes first, then a similar one in the same group, then a similar full name.
    """
    names = sorted({v for v in valid if not f"{name}.".startswith(f"{v}.")})
    parent, _, last = name.rpartition(".")
    namesakes = [v for v in names if v.rpartition(".")[2] == last]
    siblings = {v.rpartition(".")[2]: v for v in names if v.rpartition(".")[0] == parent}
    close = (
        difflib.get_close_matches(name, namesakes, 1, cutoff=0.0)
        or [siblings[key] for key in difflib.get_close_matches(last, siblings, 1)]
        or ([] if parent and siblings else difflib.get_close_matches(name, names, 1))
    )
    if close:
        return f"; did you mean {close[0]}?"
    return f"; valid are {', '.join(siblings.values() or [v for v in names if '.' not in v])}"


def setting_names(schema: Any, prefix: str = "") -> Iterator[str]:
    """The full names of all typed settings and of their groups."""
    for name, kind in typing.get_type_hints(schema).items():
        yield prefix + name
        if is_dataclass(kind):
            yield from setting_names(kind, f"{prefix}{name}.")


def shown(value: Any) -> str:
    """``value`` as one would write it in yaml, cut to fit on a line."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def convert(value: Any, kind: Any, name: str, root: Any = None) -> Any:
    """``value`` as the annotated type ``kind``, or a ConfigError that names the setting."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return build(value, kind, name, root)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return convert(value, next(a for a in args if a is not type(None)), name, root)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{name}={shown(value)} is not a choice{nearest(str(value), map(str, args))}")
        return value
    if origin is tuple:
        if isinstance(value, list) and args[1:] == (...,):
            return tuple(convert(v, args[0], f"{name}[{i}]", root) for i, v in enumerate(value))
        if not isinstance(value, list) or len(value) != len(args):
            raise ConfigError(f"{name}={shown(value)} must be a list of {len(args)} values")
        return tuple(convert(v, a, f"{name}[{i}]", root) for i, (v, a) in enumerate(zip(value, args, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{name}={shown(value)} must be a mapping (a node with _target_)")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        text = repr(value) if isinstance(value, str) else shown(value)
        raise ConfigError(f"{name}={text} must be {_WORDS.get(kind, kind.__name__)}")
    return value


def build(values: Any, schema: Any, prefix: str = "", root: Any = None) -> Any:
    """The dataclass ``schema`` from a tree of plain values; a ConfigError names what does not fit.

    ``prefix`` is the full name of the group, ``root`` the schema of the whole tree, for the nearest valid name.
    """
    root = root or schema
    if not isinstance(values, dict):
        raise ConfigError(
            f"{prefix}={shown(values)} must be a group of settings, such as {prefix}.{fields(schema)[0].name}"
        )
    hints = typing.get_type_hints(schema)
    dotted = f"{prefix}." if prefix else ""
    for key, value in values.items():
        if key not in hints:
            name, leaf = f"{dotted}{key}", value
            while isinstance(leaf, dict) and len(leaf) == 1:
                ((inner, leaf),) = leaf.items()
                name = f"{name}.{inner}"
            raise ConfigError(f"{name}={shown(leaf)}: there is no setting {name}{nearest(name, setting_names(root))}")
    for key in hints:
        if key not in values:
            raise ConfigError(f"{dotted}{key} is missing: give it a value, {dotted}{key}=...")
    return schema(**{key: convert(values[key], hint, f"{dotted}{key}", root) for key, hint in hints.items()})
