"""The schema of the settings tree: types and cross-field checks. Values live in conf/, never here.

Strategies (advantage, losses, schedules, recycler, verifiers, backends, the loop itself) are ``_target_`` nodes: the
yaml names the class and its arguments, and ``Node`` fields hold them untouched.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

Node = dict[str, Any]
"""A ``_target_`` node, built by hydra."""


class ConfigError(ValueError):
    """A setting that cannot work: the message names it, its value and the fix."""


@dataclass(frozen=True)
class ModelConfig:
    path: str
    dtype: Literal["fp32", "bf16"]


@dataclass(frozen=True)
class ParallelConfig:
    ranks: int
    tensor: int
    pipeline: int


@dataclass(frozen=True)
class DataConfig:
    source: Node
    heldout_share: float


@dataclass(frozen=True)
class TrainerConfig:
    loop: Node
    total_steps: int
    tasks_per_step: int
    max_tokens_per_microbatch: int
    eval_every: int


@dataclass(frozen=True)
class RolloutConfig:
    backend: Node
    samples_per_task: int
    temperature: float
    max_new_tokens: int
    max_logprob_error: float
    probe_prompts: int
    probe_tokens: int


@dataclass(frozen=True)
class RewardConfig:
    unparsed: float | None
    truncated: float | None
    timeout: float | None
    error: float | None


@dataclass(frozen=True)
class KindConfig:
    mode: Literal["rl", "supervised"]


@dataclass(frozen=True)
class ObjectiveConfig:
    update: Literal["alternating", "joint"]
    updates_per_period: int
    pointwise: KindConfig
    pairwise: KindConfig
    reflection: KindConfig
    kl_estimator: Node
    pool_size: int | None
    status_rewards: RewardConfig


@dataclass(frozen=True)
class OptimConfig:
    lr: float
    min_lr: float
    decay: Literal["constant", "linear", "cosine"]
    warmup_updates: int
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float


@dataclass(frozen=True)
class EvalConfig:
    items: int
    max_new_tokens: int
    rounds: int


@dataclass(frozen=True)
class TrackingConfig:
    wandb: Literal["online", "offline", "disabled"]
    wandb_project: str
    record_groups: int


@dataclass(frozen=True)
class EngineConfig:
    bucket_mb: float
    timeout_s: float


@dataclass(frozen=True)
class Config:
    name: str
    seed: int
    run_dir: str
    model: ModelConfig
    parallel: ParallelConfig
    data: DataConfig
    trainer: TrainerConfig
    rollout: RolloutConfig
    objective: ObjectiveConfig
    optim: OptimConfig
    eval: EvalConfig
    tracking: TrackingConfig
    engine: EngineConfig
    advantage: Node
    policy_loss: Node
    kl_schedule: Node
    weight_schedule: Node
    recycle: Node
    demonstrations: Node
    verifiers: Node


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """"; did you mean X?" for the closest valid name, or the list of all when nothing is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]}?" if close else f"; valid are {', '.join(names)}"


def _convert(value: Any, kind: Any, name: str) -> Any:
    """``value`` as the annotated type ``kind``, or a ConfigError that names the setting."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _build(value, kind, name)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), name)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{name}={value} is not a valid choice{nearest(str(value), map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(args):
            raise ConfigError(f"{name}={value} must be a list of {len(args)} values")
        return tuple(_convert(v, a, f"{name}[{i}]") for i, (v, a) in enumerate(zip(value, args, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{name}={value} must be a mapping (a node with _target_)")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name}={value!r} must be of type {kind.__name__}")
    return value


def _build(values: Any, schema: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix}={values} must be a group of settings")
    hints = typing.get_type_hints(schema)
    known = [f.name for f in fields(schema)]
    dotted = f"{prefix}." if prefix else ""
    for key in values:
        if key not in known:
            raise ConfigError(f"{dotted}{key} is not a setting{nearest(str(key), known)}")
    for key in known:
        if key not in values:
            raise ConfigError(f"{dotted}{key} is missing: give it a value, for example {dotted}{key}=...")
    return schema(**{key: _convert(values[key], hints[key], f"{dotted}{key}") for key in known})


def parse(cfg: DictConfig) -> Config:
    """The typed settings of a composed configuration.

    Raises:
        ConfigError: an unknown, missing, mistyped or contradictory setting.
    """
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is missing: give it a value, for example {error.full_key}=...") from error
    except InterpolationResolutionError as error:
        raise ConfigError(f"{error.full_key}: {error.msg}") from error
    assert isinstance(values, dict)
    config: Config = _build(values, Config, "")
    check(config)
    return config


def _positive(config: Config) -> None:
    for name in (
        "parallel.ranks", "parallel.tensor", "parallel.pipeline", "trainer.total_steps", "trainer.tasks_per_step",
        "trainer.max_tokens_per_microbatch", "rollout.temperature", "rollout.max_new_tokens",
        "rollout.max_logprob_error", "rollout.probe_prompts", "rollout.probe_tokens", "objective.updates_per_period",
        "optim.lr", "optim.clip_grad", "eval.items", "eval.max_new_tokens", "engine.bucket_mb", "engine.timeout_s",
    ):  # fmt: skip
        group, _, key = name.partition(".")
        value = getattr(getattr(config, group), key)
        if value <= 0:
            raise ConfigError(f"{name}={value} must be greater than 0")


def _divides(divisor_name: str, divisor: int, name: str, value: int) -> None:
    if value % divisor:
        raise ConfigError(f"{divisor_name}={divisor} does not divide {name}={value}: choose values that divide")


def check(config: Config) -> None:
    """Contradictions between settings; ConfigError names both sides."""
    _positive(config)
    parallel, trainer, rollout = config.parallel, config.trainer, config.rollout
    _divides("parallel.tensor * parallel.pipeline", parallel.tensor * parallel.pipeline, "parallel.ranks", parallel.ranks)
    _divides("parallel.ranks", parallel.ranks, "trainer.tasks_per_step", trainer.tasks_per_step)
    if rollout.samples_per_task < 2:
        raise ConfigError(
            f"rollout.samples_per_task={rollout.samples_per_task}: a group needs at least 2 rollouts, or every advantage is 0"
        )
    if not 0 < config.data.heldout_share < 1:
        raise ConfigError(f"data.heldout_share={config.data.heldout_share} must lie between 0 and 1")
    if config.optim.min_lr > config.optim.lr:
        raise ConfigError(f"optim.min_lr={config.optim.min_lr} is greater than optim.lr={config.optim.lr}")
    if trainer.eval_every < 0:
        raise ConfigError(f"trainer.eval_every={trainer.eval_every} must be 0 (never) or a number of steps")
    check_model(config)


def check_model(config: Config) -> None:
    """The layout against the model's shape, read from its config.json."""
    path = Path(config.model.path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={config.model.path} is not a model directory: {path} does not exist")
    hf = json.loads(path.read_text())
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        _divides("parallel.tensor", tensor, f"{key} (of {path})", hf[key])
    _divides("parallel.pipeline", pipeline, f"num_hidden_layers (of {path})", hf["num_hidden_layers"])
    if config.rollout.max_new_tokens >= hf["max_position_embeddings"]:
        raise ConfigError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} leaves no room for a prompt: the model takes "
            f"{hf['max_position_embeddings']} tokens (max_position_embeddings of {path})"
        )
