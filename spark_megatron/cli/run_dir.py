"""The directory of a run: fresh, and with what is needed to repeat the run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from spark_megatron.config import ConfigError

PACKAGES = ("torch", "megatron-core", "transformers", "hydra-core")


def reserve(path: Path) -> None:
    """Make the directory; ConfigError where it cannot be made or a run already has its results."""
    if (path / "metrics.jsonl").exists():
        raise ConfigError(f"run_dir={path} already holds a run: choose another run_dir or remove it")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={path} cannot be made ({error.strerror}): choose another directory") from error


def prepare(path: Path, composed: DictConfig) -> None:
    """Reserve the directory and write the resolved settings, git revision and package versions into it."""
    reserve(path)
    resolved = OmegaConf.merge(composed, {"run_dir": str(path)})
    OmegaConf.save(resolved, path / "config.yaml", resolve=True)
    (path / "provenance.json").write_text(json.dumps(provenance(), indent=2) + "\n")


def provenance() -> dict[str, object]:
    """Git revision (None outside a checkout) and versions of what the numbers depend on."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    versions = {name: version(name) for name in PACKAGES}
    return {"git": git.stdout.strip() or None, "python": sys.version.split()[0], "packages": versions}
