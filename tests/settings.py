"""Settings for tests that need no model, only the shape of one."""

from __future__ import annotations

import json
from pathlib import Path

from spark_megatron.cli.compose import compose_config
from spark_megatron.config import Config, parse

SHAPE = {
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


def typed(directory: Path, *overrides: str) -> Config:
    """Typed settings with results and a tiny model's shape below ``directory``."""
    model = save_shape(directory / "shape")
    return parse(compose_config([f"model.path={model}", f"run_dir={directory / 'run'}", *overrides]))
