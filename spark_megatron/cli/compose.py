"""From command-line overrides to checked settings, with errors that a user can act on."""

from __future__ import annotations

import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_class, get_method
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spark_megatron.config import Config, ConfigError, nearest, parse
from spark_megatron.paths import conf_dir


def compose_config(overrides: list[str]) -> DictConfig:
    """The composed, still untyped settings.

    Raises:
        ConfigError: an override that names no setting or group, or cannot be read.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            _check_groups(overrides)
            return compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from error


def load(overrides: list[str]) -> tuple[DictConfig, Config]:
    """Composed settings and their checked, typed form; every ``_target_`` in them exists."""
    composed = compose_config(overrides)
    config = parse(composed)
    _check_targets(OmegaConf.to_container(composed, resolve=True), "")
    return composed, config


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def _check_groups(overrides: list[str]) -> None:
    """A group override must name one of the group's files."""
    for override in OverridesParser.create().parse_overrides(overrides):
        group = override.key_or_group.split("@")[0]
        value = override.value()
        if (conf_dir() / group).is_dir() and isinstance(value, str) and value not in _choices(group):
            raise ConfigError(f"{group}={value} does not exist{nearest(value, _choices(group))}")


def _all_keys(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [prefix]
    return [prefix] * bool(prefix) + [k for key, v in node.items() for k in _all_keys(v, f"{prefix}.{key}" if prefix else key)]


def _explain(error: Exception, overrides: list[str]) -> str:
    """Hydra's message, and for an unknown key the nearest one that exists."""
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if not unknown:
        return str(error).splitlines()[0]
    name = unknown[1]
    known = [o for o in overrides if o.split("=")[0].lstrip("+~") != name and (conf_dir() / o.split("=")[0]).is_dir()]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        keys = _all_keys(OmegaConf.to_container(compose("config", known), resolve=False))
    groups = [path.name for path in conf_dir().iterdir() if path.is_dir()]
    value = next((o.partition("=")[2] for o in overrides if o.split("=")[0].lstrip("+~") == name), "")
    return f"{name}={value}: there is no setting {name}{nearest(name, keys + groups)}"


def _check_targets(node: object, prefix: str) -> None:
    """Every ``_target_`` can be imported; ConfigError names the one that cannot."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            _check_targets(item, f"{prefix}[{i}]")
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        _check_targets(value, f"{prefix}.{key}" if prefix else str(key))
    if "_target_" in node:
        target = node["_target_"]
        find = get_class if target.rpartition(".")[2][:1].isupper() else get_method
        try:
            find(target)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{prefix}._target_={target} cannot be imported: {error}") from error


def write_resolved(composed: DictConfig, directory: Path) -> Path:
    """Write the resolved settings beside the results."""
    path = directory / "config.yaml"
    OmegaConf.save(composed, path, resolve=True)
    return path
