"""Settings for tests that need no model, only the shape of one."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from spark_megatron.checks import parse
from spark_megatron.cli.compose import compose_config
from spark_megatron.config import Config

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 301,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}


def save_shape(directory: Path, **changes: object) -> Path:
    """Write a config.json that describes a tiny model (None leaves an entry out); returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = {key: value for key, value in (SHAPE | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


@functools.cache
def _defaults() -> DictConfig:
    return compose_config([])


def composed(directory: Path, *overrides: str) -> DictConfig:
    """The default settings, with results and a tiny model's shape below ``directory``, and some values changed.

    ``overrides`` are those of the command line, but for the choice of another file for a group. Composing again for
    each of hundreds of tests would take a minute.
    """
    cfg = copy.deepcopy(_defaults())
    with open_dict(cfg):
        for override in (f"model.path={save_shape(directory / 'shape')}", f"run_dir={directory / 'run'}", *overrides):
            parsed = OverridesParser.create().parse_override(override)
            parent, _, key = parsed.key_or_group.rpartition(".")
            if parsed.is_delete():
                del (OmegaConf.select(cfg, parent) if parent else cfg)[key]
            else:
                OmegaConf.update(cfg, parsed.key_or_group, parsed.value(), force_add=True)
    return cfg


def typed(directory: Path, *overrides: str) -> Config:
    """The typed form of these settings."""
    return parse(composed(directory, *overrides))
