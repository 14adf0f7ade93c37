"""The directory of a run, with what is needed to repeat the run."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from spark_megatron import runtime
from spark_megatron.schema import ConfigError
from spark_megatron.tracking.jsonl import cut


def reserve(path: Path) -> None:
    """Make the directory; ConfigError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={path} cannot be made ({error.strerror}): choose another directory") from error


def prepare(path: Path, composed: DictConfig, step: int) -> None:
    """Reserve the directory and write the resolved settings, git revision and package versions into it.

    What an earlier start logged after ``step`` is removed: this one does these steps again.
    """
    reserve(path)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        cut(path / name, step)
    resolved = OmegaConf.merge(composed, {"run_dir": str(path)})
    OmegaConf.save(resolved, path / "config.yaml", resolve=True)
    (path / "provenance.json").write_text(json.dumps(runtime.provenance(), indent=2) + "\n")
