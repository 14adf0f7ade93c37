"""The schema of the settings tree: types and cross-field checks. Values live in conf/, never here.

Strategies (advantage, losses, schedules, recycler, verifiers, backends, the loop itself) are ``_target_`` nodes: the
yaml names the class and its arguments, and ``Node`` fields hold them untouched.
"""

from __future__ import annotations

import difflib
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from spark_megatron.architecture import FAMILIES, Architecture, Layout
from spark_megatron.types import Status

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
    context: int
    expert: int
    virtual: int
    sequence: bool

    @property
    def layout(self) -> Layout:
        return Layout(self.tensor, self.pipeline, self.context, self.expert, self.virtual, self.sequence)


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
    """What a rollout without a reward earns in training; None masks it out of its group."""

    unparsed: float | None
    truncated: float | None
    timeout: float | None
    error: float | None

    def table(self) -> dict[Status, float | None]:
        return {
            "unparsed": self.unparsed,
            "truncated": self.truncated,
            "timeout": self.timeout,
            "error": self.error,
        }


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
    decay: Literal["constant", "linear", "cosine", "wsd"]
    decay_updates: int | None
    wsd_updates: int
    warmup_updates: int
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float
    frozen: tuple[str, ...]
    offload: bool


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
    logits_mb: float
    timeout_s: float


@dataclass(frozen=True)
class CheckpointConfig:
    """``resume`` is "auto", "never" or the directory of a checkpoint."""

    every: int
    keep: int
    asynchronous: bool
    resume: str


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
    checkpoint: CheckpointConfig
    advantage: Node
    policy_loss: Node
    kl_schedule: Node
    weight_schedule: Node
    recycle: Node
    demonstrations: Node
    verifiers: Node


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a message, "; did you mean X?", with the closest of the valid (dotted) names, or a list of them.

    The same last part in another group comes first, then a similar one in the same group, then a similar full name.
    """
    names = sorted({v for v in valid if not f"{name}.".startswith(f"{v}.")})
    parent, _, last = name.rpartition(".")
    namesakes = [v for v in names if v.rpartition(".")[2] == last]
    siblings = {v.rpartition(".")[2]: v for v in names if v.rpartition(".")[0] == parent}
    close = (
        difflib.get_close_matches(name, namesakes, 1, cutoff=0.0)
        or [siblings[key] for key in difflib.get_close_matches(last, siblings, 1)]
        or ([] if parent and siblings else difflib.get_close_matches(name, names, 1))
    )
    if close:
        return f"; did you mean {close[0]}?"
    return f"; valid are {', '.join(siblings.values() or [v for v in names if '.' not in v])}"


def setting_names(schema: Any = Config, prefix: str = "") -> Iterator[str]:
    """The full names of all typed settings and of their groups."""
    for name, kind in typing.get_type_hints(schema).items():
        yield prefix + name
        if is_dataclass(kind):
            yield from setting_names(kind, f"{prefix}{name}.")


def shown(value: Any) -> str:
    """``value`` as one would write it in yaml, cut to fit on a line."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def convert(value: Any, kind: Any, name: str) -> Any:
    """``value`` as the annotated type ``kind``, or a ConfigError that names the setting."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _build(value, kind, name)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return convert(value, next(a for a in args if a is not type(None)), name)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{name}={shown(value)} is not a choice{nearest(str(value), map(str, args))}")
        return value
    if origin is tuple:
        if isinstance(value, list) and args[1:] == (...,):
            return tuple(convert(v, args[0], f"{name}[{i}]") for i, v in enumerate(value))
        if not isinstance(value, list) or len(value) != len(args):
            raise ConfigError(f"{name}={shown(value)} must be a list of {len(args)} values")
        return tuple(convert(v, a, f"{name}[{i}]") for i, (v, a) in enumerate(zip(value, args, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{name}={shown(value)} must be a mapping (a node with _target_)")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        text = repr(value) if isinstance(value, str) else shown(value)
        raise ConfigError(f"{name}={text} must be {_WORDS.get(kind, kind.__name__)}")
    return value


def _build(values: Any, schema: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(
            f"{prefix}={shown(values)} must be a group of settings, such as {prefix}.{fields(schema)[0].name}"
        )
    hints = typing.get_type_hints(schema)
    dotted = f"{prefix}." if prefix else ""
    for key, value in values.items():
        if key not in hints:
            name, leaf = f"{dotted}{key}", value
            while isinstance(leaf, dict) and len(leaf) == 1:
                ((inner, leaf),) = leaf.items()
                name = f"{name}.{inner}"
            raise ConfigError(f"{name}={shown(leaf)}: there is no setting {name}{nearest(name, setting_names())}")
    for key in hints:
        if key not in values:
            raise ConfigError(f"{dotted}{key} is missing: give it a value, {dotted}{key}=...")
    return schema(**{key: convert(values[key], hint, f"{dotted}{key}") for key, hint in hints.items()})


def parse(cfg: DictConfig) -> Config:
    """The typed settings of a composed configuration.

    Raises:
        ConfigError: an unknown, missing, mistyped or contradictory setting.
    """
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is missing: give it a value, {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    config: Config = _build(values, Config, "")
    check(config)
    return config


_POSITIVE = (
    "parallel.ranks", "parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.expert", "parallel.virtual",
    "trainer.total_steps", "trainer.tasks_per_step",
    "trainer.max_tokens_per_microbatch", "rollout.temperature", "rollout.max_new_tokens", "rollout.max_logprob_error",
    "rollout.probe_prompts", "rollout.probe_tokens", "objective.updates_per_period", "optim.lr", "optim.eps",
    "optim.clip_grad", "eval.items", "eval.max_new_tokens", "engine.bucket_mb", "engine.logits_mb",
    "engine.timeout_s", "checkpoint.keep",
)  # fmt: skip
_NOT_NEGATIVE = (
    "trainer.eval_every", "optim.min_lr", "optim.warmup_updates", "optim.wsd_updates", "optim.weight_decay",
    "eval.rounds", "tracking.record_groups", "checkpoint.every",
)  # fmt: skip


def _check_ranges(config: Config) -> None:
    for name in _POSITIVE + _NOT_NEGATIVE:
        group, _, key = name.partition(".")
        value = getattr(getattr(config, group), key)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value} must be a finite number, 0 or more")
        if value == 0 and name in _POSITIVE:
            raise ConfigError(f"{name}={value} must be greater than 0")
    if config.optim.decay_updates is not None and config.optim.decay_updates <= 0:
        raise ConfigError(f"optim.decay_updates={config.optim.decay_updates} must be greater than 0, or null")
    for index, beta in enumerate(config.optim.betas):
        if not 0 <= beta < 1:
            raise ConfigError(f"optim.betas[{index}]={beta} must lie in [0, 1)")
    if not 0 < config.data.heldout_share < 1:
        raise ConfigError(f"data.heldout_share={config.data.heldout_share} must lie between 0 and 1")


def _divides(divisor_name: str, divisor: int, name: str, value: int) -> None:
    if value % divisor:
        raise ConfigError(f"{divisor_name}={divisor} does not divide {name}={value}: choose values that divide")


def check(config: Config) -> None:
    """Values out of range and contradictions between settings; ConfigError names both sides."""
    _check_ranges(config)
    parallel, trainer, rollout, objective = config.parallel, config.trainer, config.rollout, config.objective
    _divides("parallel.ranks", parallel.ranks, "trainer.tasks_per_step", trainer.tasks_per_step)
    if rollout.samples_per_task < 2:
        raise ConfigError(
            f"rollout.samples_per_task={rollout.samples_per_task}: a group needs at least 2 rollouts, or every "
            "advantage is 0"
        )
    _check_schedule(config.optim)
    if objective.pool_size is not None and objective.pool_size < trainer.tasks_per_step:
        raise ConfigError(
            f"objective.pool_size={objective.pool_size} is smaller than trainer.tasks_per_step="
            f"{trainer.tasks_per_step}: the pool could never fill a reward period"
        )
    _check_verifiers(config)
    _check_model(config)


def _check_schedule(optim: OptimConfig) -> None:
    if optim.min_lr > optim.lr:
        raise ConfigError(f"optim.min_lr={optim.min_lr} is greater than optim.lr={optim.lr}")
    if (optim.decay == "wsd") != (optim.wsd_updates > 0):
        raise ConfigError(
            f"optim.wsd_updates={optim.wsd_updates} with optim.decay={optim.decay}: the number of last updates over "
            "which the rate falls must be above 0 with wsd, and 0 without"
        )
    if optim.decay_updates is not None and optim.wsd_updates > optim.decay_updates:
        raise ConfigError(
            f"optim.wsd_updates={optim.wsd_updates} is greater than optim.decay_updates={optim.decay_updates}"
        )


def _check_verifiers(config: Config) -> None:
    nodes = {"data.source.verifier": config.data.source, "recycle.judge_verifier": config.recycle}
    nodes["demonstrations.judge_verifier"] = config.demonstrations
    for name, node in nodes.items():
        verifier = node.get(name.rpartition(".")[2])
        if verifier is not None and verifier not in config.verifiers:
            raise ConfigError(
                f"{name}={shown(verifier)} is no key of verifiers{nearest(str(verifier), config.verifiers)}"
            )


def _check_model(config: Config) -> None:
    """The layout against the number of ranks and the model's sizes, which its config.json has."""
    path = Path(config.model.path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={config.model.path} is not a model directory: {path} does not exist")
    try:
        described = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.path={config.model.path}: {path} holds no JSON object: {error}") from error
    if described.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"model.path={config.model.path}: {path} has model_type={described.get('model_type')}; supported are "
            f"{', '.join(FAMILIES)}"
        )
    try:
        longest = described["max_position_embeddings"]
        model = Architecture.of(described)
    except KeyError as error:
        raise ConfigError(
            f"model.path={config.model.path}: {path} has no {error.args[0]}: give a Hugging Face model directory"
        ) from error
    try:
        config.parallel.layout.data(config.parallel.ranks)
        model.check(config.parallel.layout)
    except ValueError as error:
        raise ConfigError(f"{error} (model.path={config.model.path})") from error
    if config.rollout.max_new_tokens >= longest:
        raise ConfigError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} leaves no room for a prompt: the model takes "
            f"{longest} tokens (max_position_embeddings of {path})"
        )
