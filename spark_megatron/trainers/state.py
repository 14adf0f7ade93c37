"""What must survive of a run beside weights, optimizer and the ranks' random states, which the engine's checkpoint has.

This module loads none of the heavy libraries, so that a start can look into a checkpoint before anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_megatron import runtime
from spark_megatron.architecture import Architecture
from spark_megatron.config import Config
from spark_megatron.schema import ConfigError, shown

if TYPE_CHECKING:
    from spark_megatron.trainers.parts import Parts

FOLDER = "checkpoints"
"""Where a run directory has its checkpoints."""

REWARD_MODEL = "reward_model"
"""Where it has those of a reward model, below a folder of the same name, and the trained reward model itself."""

FORMAT = 1
"""Raised by one whenever an older program could misread what is saved."""

NOT_SET = "(not set)"


@dataclass
class RunState:
    """The position of a run, and the state of those of its parts that move with it.

    ``step`` is the number of finished steps, ``origin`` the checkpoint that the run directory was begun with (None: the
    start model), ``before`` the evaluation of the start model in the form of eval.json, ``best`` the highest held-out
    accuracy at solving that an evaluation between two steps has found.
    """

    cfg: Config
    parts: Parts
    origin: str | None = None
    step: int = 0
    before: dict[str, Any] | None = None
    best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain data that JSON can hold, with the settings and versions that it comes from."""
        version, internal, gauss = self.parts.rng.getstate()
        return {
            "format": FORMAT,
            "origin": self.origin,
            "step": self.step,
            "before": self.before,
            "best": self.best,
            "stream": self.parts.stream.state_dict(),
            "pool": self.parts.pool.state_dict(),
            "lengths": self.parts.lengths.state_dict(),
            "kl_schedule": self.parts.kl_schedule.state_dict(),
            "monitor": self.parts.reward_model.monitor.state_dict() if self.parts.reward_model else None,
            "rng": [version, list(internal), gauss],
            "config": settings(self.cfg),
            "model": architecture(self.cfg),
            "provenance": runtime.provenance(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        On other tasks the stream starts anew and warns; another kind of KL schedule starts with its own first state.
        """
        self.origin, self.step, self.before, self.best = (state[k] for k in ("origin", "step", "before", "best"))
        self.parts.stream.load_state_dict(state["stream"])
        self.parts.pool.load_state_dict(state["pool"])
        self.parts.lengths.load_state_dict(state.get("lengths", {}))  # which older checkpoints do not have
        if state["config"]["kl_schedule"]["_target_"] == self.cfg.kl_schedule["_target_"]:
            self.parts.kl_schedule.load_state_dict(state["kl_schedule"])
        if self.parts.reward_model:
            self.parts.reward_model.monitor.load_state_dict(state["monitor"])
        version, internal, gauss = state["rng"]
        self.parts.rng.setstate((version, tuple(internal), gauss))


def settings(cfg: Config) -> dict[str, Any]:
    """The settings as plain data."""
    return _plain(asdict(cfg))


def architecture(cfg: Config) -> dict[str, Any]:
    """The sizes of the start model as plain data."""
    described = json.loads((Path(cfg.model.path) / "config.json").read_text(encoding="utf-8"))
    return _plain(asdict(Architecture.of(described)))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def check_fit(state: Mapping[str, Any], cfg: Config, path: Path) -> None:
    """Refuse to go on from ``path`` with what its weights and counters mean nothing to.

    Raises:
        ConfigError: saved by no run, in another format, by another training loop, or with a model of another shape or
            precision.
    """
    if "format" not in state:
        raise ConfigError(
            f"{path} holds a model but no run to go on with: convert it and start from that, model.path=..."
        )
    if state["format"] != FORMAT:
        raise ConfigError(
            f"{path} has the format {state['format']}, this program reads {FORMAT}: go on with the version that saved "
            f"it ({state['provenance']})"
        )
    saved, now = state["config"], settings(cfg)
    told = [
        ("trainer.loop._target_", saved["trainer"]["loop"]["_target_"], now["trainer"]["loop"]["_target_"]),
        ("model.dtype", saved["model"]["dtype"], now["model"]["dtype"]),
    ]
    model = architecture(cfg)
    told += [
        (f"{size} (of model.path={cfg.model.path})", state["model"].get(size, model[size]), model[size])
        for size in model
    ]
    for name, old, new in told:
        if old != new:
            raise ConfigError(
                f"{name}={new}, but {path} was saved with {old}: set it back, or take another run_dir and start from "
                "a model (model.path=...)"
            )


def changes(state: Mapping[str, Any], cfg: Config) -> list[str]:
    """What differs from when ``state`` was saved, "name: old -> new" each: settings, versions and git revision."""
    old, new = _flat({**state["config"], **state["provenance"]}), _flat({**settings(cfg), **runtime.provenance()})
    names = [name for name in {**old, **new} if name not in ("run_dir", "checkpoint.resume")]
    return [
        f"{name}: {shown(old.get(name, NOT_SET))} -> {shown(new.get(name, NOT_SET))}"
        for name in names
        if old.get(name, NOT_SET) != new.get(name, NOT_SET)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves
