"""The strategies of a configuration: every ``_target_`` node is checked against the class or function that it names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from spark_megatron.config import Node
from spark_megatron.schema import ConfigError, convert, nearest, shown

SUPPLIED: Mapping[str, Collection[str]] = {
    "objective.kl_estimator": ("logp", "ref_logp"),
    "rollout.backend": ("model", "tokenizer", "dtype", "stop_tokens", "read_weights"),
    "trainer.loop": ("cfg", "parts", "saves"),
}
"""Arguments that the program adds to those of a node; they are no settings."""

UNIMPORTED = "spark_megatron.trainers."
"""Modules that need all of megatron-core, too slow to import for a check: their source is read instead."""

BUILT = (
    "data.source", "data.heldout", "curriculum.order", "curriculum.resample", "objective.kl_estimator",
    "advantage", "policy_loss", "correction", "kl_schedule", "weight_schedule",
    "recycle", "demonstrations", "verifiers", "label_noise", "assistant", "triples",
)  # fmt: skip
"""Nodes that are cheap to build, so that their own checks can speak before anything is started."""

MAPPINGS = ("verifiers", "benchmark")
"""Of them, those that are mappings of nodes."""

_HYDRA_KEYS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")
_PLAIN = (int, float, bool, str)


@dataclass(frozen=True)
class Arguments:
    """What a class or function takes by name; ``kinds`` has the types of those that are annotated."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool
    """Whether any other name is accepted too (``**kwargs``)."""
    kinds: Mapping[str, Any]


def check_nodes(values: Mapping[str, Any], built: Sequence[str] = BUILT) -> None:
    """Refuse nodes that could not be built, given all resolved settings; those of ``built`` are.

    Raises:
        ConfigError: a ``_target_`` that does not exist, an argument that it does not take, lacks or cannot accept.
    """
    for name, node in _nodes(values, ""):
        _check_node(name, node)
    for name in built:
        node = _select(values, name)
        if node is not None:
            _try_to_build(name, node)


def _nodes(value: Any, name: str) -> Iterator[tuple[str, Node]]:
    """All nodes with their full names, the outer ones first."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield name, value
        for key, item in value.items():
            yield from _nodes(item, f"{name}.{key}" if name else str(key))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _nodes(item, f"{name}[{index}]")


def _select(values: Mapping[str, Any], name: str) -> Any:
    group, _, key = name.partition(".")
    return values[group][key] if key else values[group]


def _check_node(name: str, node: Node) -> None:
    takes = _arguments(f"{name}._target_", node["_target_"])
    settable = [argument for argument in takes.names if argument not in SUPPLIED.get(name, ())]
    for key, value in node.items():
        full = f"{name}.{key}"
        if key in settable:
            _check_value(full, value, takes.kinds.get(key, Any))
        elif key not in _HYDRA_KEYS and not (takes.open and key not in SUPPLIED.get(name, ())):
            near = nearest(full, [f"{name}.{argument}" for argument in settable]) if settable else ""
            raise ConfigError(f"{full}={shown(value)}: {node['_target_']} takes no argument {key}{near}")
    missing = [argument for argument in takes.required if argument in settable and argument not in node]
    if missing and not node.get("_partial_"):
        raise ConfigError(
            f"{name}.{missing[0]} is missing: {node['_target_']} needs it, give it a value, {name}.{missing[0]}=..."
        )


def _arguments(name: str, target: Any) -> Arguments:
    module, _, attribute = str(target).rpartition(".")
    try:
        if not module:
            raise ImportError("give the full name of a class or function")
        if f"{module}.".startswith(UNIMPORTED):
            return _read_arguments(module, attribute)
        return _inspected(_find(module, attribute))
    except ImportError as error:
        raise ConfigError(f"{name}={shown(target)} cannot be imported: {_line(error)}") from error


def _find(module: str, attribute: str) -> Any:
    found = importlib.import_module(module)
    if not callable(getattr(found, attribute, None)):
        own = [name for name, value in vars(found).items() if getattr(value, "__module__", None) == module]
        raise ImportError(_absent(module, attribute, own))
    return getattr(found, attribute)


def _absent(module: str, attribute: str, names: Collection[str]) -> str:
    public = [name for name in names if not name.startswith("_")]
    return f"{module} has no class or function {attribute}{nearest(attribute, public) if public else ''}"


def _inspected(target: Any) -> Arguments:
    signature = inspect.signature(target)
    named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    is_class = inspect.isclass(target)
    try:
        kinds = typing.get_type_hints(target.__init__ if is_class else target)
    except NameError:  # annotated with names that only a type checker sees
        kinds = {}
    return Arguments(
        names=tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty),
        open=any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()),
        kinds=kinds,
    )


def _read_arguments(module: str, attribute: str) -> Arguments:
    """The arguments of a function from its module's source; which are required stays open."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"no module named {module!r}")
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    functions = {item.name: item.args for item in body if isinstance(item, ast.FunctionDef)}
    if attribute not in functions:
        raise ImportError(_absent(module, attribute, functions))
    args = functions[attribute]
    return Arguments(tuple(a.arg for a in (*args.args, *args.kwonlyargs)), (), args.kwarg is not None, {})


def _check_value(name: str, value: Any, kind: Any) -> None:
    """Refuse a plain value of a wrong type, or in place of an object; the rest is the constructor's affair."""
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    options = [o for o in (typing.get_args(kind) if union else (kind,)) if o is not type(None)]
    if all(option in _PLAIN or typing.get_origin(option) is Literal for option in options):
        convert(value, kind, name)
    elif isinstance(value, _PLAIN) and all(inspect.isclass(o) and o not in (Any, object, *_PLAIN) for o in options):
        wanted = " or ".join(option.__name__ for option in options)
        raise ConfigError(f"{name}={shown(value)} must be a node with the _target_ of a {wanted}")


def _try_to_build(name: str, node: Node) -> None:
    if "_target_" not in node and name not in MAPPINGS:
        raise ConfigError(f"{name}._target_ is missing: give it a class, {name}._target_=...")
    try:
        instantiate(node)
    except InstantiationException as error:
        inner = re.search(r"^full_key: (.+)$", str(error), re.MULTILINE)
        raise ConfigError(_located(f"{name}.{inner[1]}" if inner else name, error.__cause__ or error)) from error


def _located(name: str, error: BaseException) -> str:
    """The constructor's message, after the full name of the setting where it does not begin with one."""
    text = _line(error)
    if text.startswith(f"{name}."):
        return text
    return f"{name}.{text}" if re.match(r"[\w.]+=", text) else f"{name}: {text}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
