"""From composed settings to typed ones: everything that can be refused before a run starts."""

from __future__ import annotations

import json
import math
from functools import reduce
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from spark_megatron.architecture import FAMILIES, Architecture
from spark_megatron.config import Config, DataConfig, Node, OptimConfig
from spark_megatron.schema import ConfigError, build, nearest, shown


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
    _check_data(config.data)


def _check_data(data: DataConfig) -> None:
    if data.heldout is None and not 0 < data.heldout_share < 1:
        raise ConfigError(f"data.heldout_share={data.heldout_share} must lie between 0 and 1")
    if data.heldout is not None and data.heldout_share != 0:
        raise ConfigError(
            f"data.heldout_share={data.heldout_share} with data.heldout: the held-out tasks come from there; set the "
            "share to 0, or data.heldout to null"
        )
    if data.max_prompt_tokens is not None and data.max_prompt_tokens <= 0:
        raise ConfigError(f"data.max_prompt_tokens={data.max_prompt_tokens} must be greater than 0, or null")


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
    named = [(f"{name}.judge_verifier", getattr(config, name)) for name in ("recycle", "demonstrations")]
    named += _sources("data.source", config.data.source) + _sources("data.heldout", config.data.heldout)
    for name, node in named:
        verifier = node.get(name.rpartition(".")[2])
        if verifier is not None and verifier not in config.verifiers:
            raise ConfigError(
                f"{name}={shown(verifier)} is no key of verifiers{nearest(str(verifier), config.verifiers)}"
            )


def _sources(name: str, node: Any) -> list[tuple[str, Node]]:
    """The verifier settings of a source of tasks and of those that it is made of."""
    if not isinstance(node, dict):
        return []
    inner = [found for key, value in node.items() for found in _sources(f"{name}.{key}", value)]
    return [(f"{name}.verifier", node), *inner]


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
    prompt = config.data.max_prompt_tokens
    if prompt is not None and prompt + new > longest:
        raise ConfigError(
            f"data.max_prompt_tokens={prompt} and rollout.max_new_tokens={new} are more than the {longest} tokens that "
            f"the model takes (max_position_embeddings of {file})"
        )
