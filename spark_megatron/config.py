"""The schema of the settings tree: types and cross-field checks. Values live in conf/, never here.

Strategies (advantage, losses, schedules, recycler, verifiers, backends, the loop itself) are ``_target_`` nodes: the
yaml names the class and its arguments, and ``Node`` fields hold them untouched.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from spark_megatron.architecture import FAMILIES, Architecture, Layout
from spark_megatron.schema import ConfigError, build, nearest, shown
from spark_megatron.types import Status

Node = dict[str, Any]
"""A ``_target_`` node, built by hydra."""


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
    probe_every: int
    compare_every: int


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
    max_staleness: int
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
class MonitorConfig:
    """By how much the mean reward must rise and the held-out accuracy fall to call the reward model hacked."""

    rise: float
    drop: float


@dataclass(frozen=True)
class RewardModelConfig:
    path: str
    score_seed: int
    update: bool
    rule_share: float
    anchor: float
    tries: int
    monitor: MonitorConfig
    optim: OptimConfig


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
    release: tuple[Literal["optimizer", "gradients", "parameters"], ...]
    logits_mb: float
    timeout_s: float


@dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int
    asynchronous: bool
    resume: str  # "auto", "never" or the directory of a checkpoint


SCORED = ("spark_megatron.trainers.cooper.train", "spark_megatron.trainers.verify_rm.train")
"""The training loops that have a reward model."""


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
    correction: Node
    kl_schedule: Node
    weight_schedule: Node
    recycle: Node
    demonstrations: Node
    reward_model: RewardModelConfig
    assistant: Node
    triples: Node
    verifiers: Node

    @property
    def scored(self) -> bool:
        """Whether the training loop works with the reward model."""
        return self.trainer.loop.get("_target_") in SCORED


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
    config: Config = build(values, Config)
    check(config)
    return config


_POSITIVE = (
    "parallel.ranks", "parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.expert", "parallel.virtual",
    "trainer.total_steps", "trainer.tasks_per_step",
    "trainer.max_tokens_per_microbatch", "rollout.temperature", "rollout.max_new_tokens", "rollout.max_logprob_error",
    "rollout.probe_prompts", "rollout.probe_tokens", "rollout.probe_every", "objective.updates_per_period",
    "eval.items", "eval.max_new_tokens", "engine.bucket_mb", "engine.logits_mb",
    "engine.timeout_s", "checkpoint.keep",
)  # fmt: skip
_NOT_NEGATIVE = (
    "trainer.eval_every", "eval.rounds", "tracking.record_groups", "checkpoint.every", "objective.max_staleness",
    "rollout.compare_every",
)  # fmt: skip


def _check_signs(root: Any, positive: tuple[str, ...], not_negative: tuple[str, ...], prefix: str = "") -> None:
    for name in positive + not_negative:
        value = reduce(getattr, name.split("."), root)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{prefix}{name}={value} must be a finite number, 0 or more")
        if value == 0 and name in positive:
            raise ConfigError(f"{prefix}{name}={value} must be greater than 0")


def _check_ranges(config: Config) -> None:
    _check_signs(config, _POSITIVE, _NOT_NEGATIVE)
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
    _check_optim(config.optim, "")
    if objective.pool_size is not None and objective.pool_size < trainer.tasks_per_step:
        raise ConfigError(
            f"objective.pool_size={objective.pool_size} is smaller than trainer.tasks_per_step="
            f"{trainer.tasks_per_step}: the pool could never fill a reward period"
        )
    _check_verifiers(config)
    _check_model(config)
    _check_reward_model(config)


def _check_optim(optim: OptimConfig, prefix: str) -> None:
    name = f"{prefix}optim"
    _check_signs(
        optim, ("lr", "eps", "clip_grad"), ("min_lr", "warmup_updates", "wsd_updates", "weight_decay"), f"{name}."
    )
    if optim.decay_updates is not None and optim.decay_updates <= 0:
        raise ConfigError(f"{name}.decay_updates={optim.decay_updates} must be greater than 0, or null")
    for index, beta in enumerate(optim.betas):
        if not 0 <= beta < 1:
            raise ConfigError(f"{name}.betas[{index}]={beta} must lie in [0, 1)")
    if optim.min_lr > optim.lr:
        raise ConfigError(f"{name}.min_lr={optim.min_lr} is greater than {name}.lr={optim.lr}")
    if (optim.decay == "wsd") != (optim.wsd_updates > 0):
        raise ConfigError(
            f"{name}.wsd_updates={optim.wsd_updates} with {name}.decay={optim.decay}: the number of last updates over "
            "which the rate falls must be above 0 with wsd, and 0 without"
        )
    most = optim.decay_updates
    if most is not None and optim.wsd_updates > most:
        raise ConfigError(f"{name}.wsd_updates={optim.wsd_updates} is greater than {name}.decay_updates={most}")


def _check_reward_model(config: Config) -> None:
    settings = config.reward_model
    _check_optim(settings.optim, "reward_model.")
    _check_signs(settings, ("tries",), ("anchor", "monitor.rise", "monitor.drop"), "reward_model.")
    if not 0 <= settings.rule_share <= 1:
        raise ConfigError(f"reward_model.rule_share={settings.rule_share} must lie in [0, 1]")
    if not config.scored:
        return
    setting = f"reward_model.path={settings.path}"
    model, _ = described(setting, Path(settings.path) / "config.json")
    try:
        model.check(config.parallel.layout)
    except ValueError as error:
        raise ConfigError(f"{error} ({setting})") from error


def _check_verifiers(config: Config) -> None:
    nodes = {"data.source.verifier": config.data.source, "recycle.judge_verifier": config.recycle}
    nodes["demonstrations.judge_verifier"] = config.demonstrations
    for name, node in nodes.items():
        verifier = node.get(name.rpartition(".")[2])
        if verifier is not None and verifier not in config.verifiers:
            raise ConfigError(
                f"{name}={shown(verifier)} is no key of verifiers{nearest(str(verifier), config.verifiers)}"
            )


def described(setting: str, file: Path) -> tuple[Architecture, int]:
    """The sizes in a config.json of a known family, and the most tokens that the model takes.

    Raises:
        ConfigError: names ``setting`` ("name=value"), the file, and what is wrong with it.
    """
    if not file.is_file():
        raise ConfigError(f"{setting} is not a model directory: {file} does not exist")
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{setting}: {file} holds no JSON object: {error}") from error
    if found.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"{setting}: {file} has model_type={found.get('model_type')}; supported are {', '.join(FAMILIES)}"
        )
    try:
        return Architecture.of(found), found["max_position_embeddings"]
    except KeyError as error:
        raise ConfigError(f"{setting}: {file} has no {error.args[0]}: give a Hugging Face model directory") from error


def _check_model(config: Config) -> None:
    """The layout against the number of ranks and the model's sizes, which its config.json has."""
    setting, file = f"model.path={config.model.path}", Path(config.model.path) / "config.json"
    model, longest = described(setting, file)
    if model.scalar:
        raise ConfigError(f"{setting} has a scalar head and samples nothing: give a language model")
    try:
        config.parallel.layout.data(config.parallel.ranks)
        model.check(config.parallel.layout)
    except ValueError as error:
        raise ConfigError(f"{error} ({setting})") from error
    new = config.rollout.max_new_tokens
    if new >= longest:
        raise ConfigError(
            f"rollout.max_new_tokens={new} leaves no room for a prompt: the model takes {longest} tokens "
            f"(max_position_embeddings of {file})"
        )
