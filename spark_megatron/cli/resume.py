"""What a start finds in its run directory: nothing, a run to go on with, a finished one, or a reason to refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_megatron.config import Config
from spark_megatron.engine import checkpoint_store as store
from spark_megatron.schema import ConfigError
from spark_megatron.trainers.state import FOLDER, changes, check_fit


@dataclass(frozen=True)
class Start:
    """The checkpoint to go on from (None: the start model) and its step, or that nothing is left to do.

    ``message`` says it in words.
    """

    checkpoint: Path | None
    step: int
    finished: bool
    message: str


def plan(cfg: Config) -> Start:
    """How the run that ``cfg`` describes starts; nothing is written. ``cfg.run_dir`` is absolute.

    Raises:
        ConfigError: ``checkpoint.resume`` asks for what is not there, or would mix two runs in one directory; the
            checkpoint does not fit the settings.
    """
    run_dir, resume = Path(cfg.run_dir), cfg.checkpoint.resume
    own = store.latest(run_dir / FOLDER)
    if resume == "never":
        if own or (run_dir / "metrics.jsonl").exists():
            raise ConfigError(
                f"run_dir={run_dir} already holds a run and checkpoint.resume=never: choose another run_dir, or go on "
                "with checkpoint.resume=auto"
            )
        return Start(None, 0, False, "starting at step 0")
    if own is not None:
        return _go_on(cfg, own)
    if _evaluated(run_dir) is not None:
        raise ConfigError(
            f"run_dir={run_dir} holds a finished run but no checkpoint to go on from: choose another run_dir"
        )
    if resume == "auto":
        known = (run_dir / "metrics.jsonl").exists()
        earlier = "; what was logged before is removed" if known else ""
        return Start(None, 0, False, f"no checkpoint in {run_dir / FOLDER}: starting at step 0{earlier}")
    return _branch(cfg, Path(resume).absolute())


def _go_on(cfg: Config, own: Path) -> Start:
    """From a checkpoint of the run directory itself."""
    state = _read(own)
    check_fit(state, cfg, own)
    if cfg.checkpoint.resume != "auto" and state["origin"] != str(Path(cfg.checkpoint.resume).absolute()):
        raise ConfigError(
            f"checkpoint.resume={cfg.checkpoint.resume}, but run_dir={cfg.run_dir} has checkpoints of its own: choose "
            f"another run_dir, or go on from {own.name} with checkpoint.resume=auto"
        )
    if _evaluated(Path(cfg.run_dir)) == state["step"] >= cfg.trainer.total_steps:
        message = (
            f"run_dir={cfg.run_dir} holds a finished run of {state['step']} steps: raise trainer.total_steps to go on "
            f"with it, or choose another run_dir{_listed(changes(state, cfg))}"
        )
        return Start(own, state["step"], True, message)
    return _from(own, state, cfg)


def _branch(cfg: Config, path: Path) -> Start:
    """A new run directory that begins with a checkpoint of another one."""
    if not path.is_dir():
        raise ConfigError(f"checkpoint.resume={path} does not exist: give auto, never or the directory of a checkpoint")
    inside = store.latest(path) or store.latest(path / FOLDER)
    if inside:
        raise ConfigError(f"checkpoint.resume={path} is no checkpoint; did you mean {inside}?")
    state = _read(path)
    check_fit(state, cfg, path)
    if state["step"] >= cfg.trainer.total_steps:
        raise ConfigError(
            f"trainer.total_steps={cfg.trainer.total_steps}, but checkpoint.resume={path} is at step {state['step']}: "
            "nothing is left to train, raise trainer.total_steps"
        )
    return _from(path, state, cfg)


def _from(path: Path, state: Mapping[str, Any], cfg: Config) -> Start:
    step, total = state["step"], cfg.trainer.total_steps
    return Start(path, step, False, f"going on from step {step} of {total} ({path}){_listed(changes(state, cfg))}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return store.read_state(path)
    except store.CheckpointError as error:
        raise ConfigError(str(error)) from error


def _evaluated(run_dir: Path) -> int | None:
    """The step of the evaluation with which a run ends; None before that."""
    path = run_dir / "eval.json"
    if not path.exists():
        return None
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"run_dir={run_dir}: {path.name} cannot be read ({error}): remove it") from error
    return int(known["after"].get("step", 0)) if "after" in known else None


def _listed(differences: list[str]) -> str:
    return "".join(["; changed since then:", *(f"\n  {line}" for line in differences)]) if differences else ""
