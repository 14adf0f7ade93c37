"""From command-line overrides to checked settings, with errors that a user can act on."""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spark_megatron.checks import parse
from spark_megatron.cli.nodes import check_nodes
from spark_megatron.config import Config
from spark_megatron.paths import conf_dir
from spark_megatron.rollout.fit import check_backend
from spark_megatron.schema import ConfigError, nearest


def compose_config(overrides: list[str], root: str = "config") -> DictConfig:
    """The composed, still untyped settings of the command whose file in conf/ is ``root``.

    Raises:
        ConfigError: an override that names no setting or group, or cannot be read.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            for override in overrides:
                _check_override(override, groups(root))
            return compose(root, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides, root)) from error


def load(overrides: list[str]) -> tuple[DictConfig, Config]:
    """Composed settings and their checked, typed form; the strategies in them can be built."""
    composed = compose_config(overrides)
    config = parse(composed)
    values: Any = OmegaConf.to_container(composed, resolve=True)
    check_nodes(values)
    check_backend(config)
    return composed, config


def groups(root: str = "config") -> dict[str, list[str]]:
    """The choices of every group of settings that the command with this file in conf/ has."""
    entries = yaml.safe_load((conf_dir() / f"{root}.yaml").read_text(encoding="utf-8"))["defaults"]
    names = sorted(name for entry in entries if isinstance(entry, dict) for name in entry)
    return {name: sorted(file.stem for file in (conf_dir() / name).glob("*.yaml")) for name in names}


def _check_override(override: str, choices: dict[str, list[str]]) -> None:
    """One readable value per override, and for a group the name of one of its files."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(f"{override}: cannot be read; write name=value, with quotes around special signs") from error
    name = parsed.key_or_group
    if not name:
        raise ConfigError(f"{override}: a value needs a name before it, name=value")
    if parsed.is_sweep_override():
        raise ConfigError(f"{override}: give one value; a comma in a text needs quotes around it, '\"a,b\"'")
    if name not in choices:
        return
    if parsed.is_delete():
        raise ConfigError(f"{override}: {name} cannot be left out; valid are {', '.join(choices[name])}")
    if parsed.value() not in choices[name]:
        text = override.partition("=")[2]
        raise ConfigError(f"{name}={text} does not exist{nearest(text, choices[name])}")
    if parsed.is_add():
        raise ConfigError(f"{override}: {name} is there already; write {name}={parsed.value()}")


def _all_keys(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [prefix]
    inner = [key for name, value in node.items() for key in _all_keys(value, f"{prefix}.{name}" if prefix else name)]
    return [prefix, *inner] if prefix else inner


def _explain(error: Exception, overrides: list[str], root: str) -> str:
    """Hydra's message on one line; for an unknown name the nearest one that exists."""
    unknown = re.search(r"Could not (?:override|delete)(?: from config\.)? '([^'=]+)", str(error))
    if not unknown:
        return " ".join(str(error).split())
    name = unknown[1]
    given = next((o for o in overrides if o.lstrip("+~").partition("=")[0] == name), name)
    chosen = [o for o in overrides if o.partition("=")[0] in groups(root) and o != given]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        keys = _all_keys(OmegaConf.to_container(compose(root, chosen), resolve=False))
    return f"{given}: there is no setting {name}{nearest(name, keys + list(groups(root)))}"
