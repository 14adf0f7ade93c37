"""The settings of an evaluation (conf/evaluate.yaml): their types, and what is refused before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from spark_megatron.cli.compose import compose_config
from spark_megatron.cli.nodes import check_nodes
from spark_megatron.config import DataConfig, ModelConfig, Node
from spark_megatron.eval.evaluation import Method
from spark_megatron.rollout.fit import check_sampler
from spark_megatron.schema import ConfigError, build, nearest, setting_names, shown

ROOT = "evaluate"
_BUILT = ("data.source", "judge.bank", "verifiers", "benchmark")
_TRAINING = ("max_logprob_error", "probe_prompts", "probe_tokens", "probe_every", "compare_every")
"""Settings of a rollout that only a hand-over of weights needs."""


@dataclass(frozen=True)
class SamplingConfig:
    """Of conf/rollout: the sampler, and how several answers to a question are drawn."""

    backend: Node
    samples_per_task: int
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True)
class JudgeConfig:
    bank: Node
    verifier: str


@dataclass(frozen=True)
class TestTimeConfig:
    methods: tuple[Method, ...]
    rounds: int
    score: Literal["soft", "hard"]


@dataclass(frozen=True)
class EvaluationConfig:
    name: str
    seed: int
    run_dir: str
    ranks: int
    items: int
    ks: tuple[int, ...]
    batch: int
    timeout_s: float
    model: ModelConfig
    data: DataConfig
    rollout: SamplingConfig
    verifiers: Node
    judge: JudgeConfig
    test_time: TestTimeConfig
    benchmark: Node


def load(overrides: list[str]) -> tuple[DictConfig, EvaluationConfig]:
    """Composed settings and their checked, typed form.

    Raises:
        ConfigError: names the setting, its value, and the nearest or a working one.
    """
    composed = compose_config(overrides, ROOT)
    _refuse_training(overrides)
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is missing: give it a value, {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    for name in _TRAINING:
        values["rollout"].pop(name, None)
    config: EvaluationConfig = build(values, EvaluationConfig)
    _check(config)
    check_nodes(values, _BUILT)
    return composed, config


def _refuse_training(overrides: list[str]) -> None:
    for override in overrides:
        name = override.lstrip("+~").partition("=")[0]
        if name in {f"rollout.{key}" for key in _TRAINING}:
            near = nearest(name, setting_names(EvaluationConfig))
            raise ConfigError(f"{override}: there is no setting {name} in an evaluation{near}")


def _check(config: EvaluationConfig) -> None:
    rollout, test_time = config.rollout, config.test_time
    least = {
        "ranks": (config.ranks, 1),
        "items": (config.items, 0),
        "batch": (config.batch, 1),
        "rollout.samples_per_task": (rollout.samples_per_task, 0),
        "rollout.max_new_tokens": (rollout.max_new_tokens, 1),
        "test_time.rounds": (test_time.rounds, 0),
        **{f"ks[{i}]": (k, 1) for i, k in enumerate(config.ks)},
    }
    for name, (value, lowest) in least.items():
        if value < lowest:
            raise ConfigError(f"{name}={value} must be {lowest} or more")
    for name, number in {"rollout.temperature": rollout.temperature, "timeout_s": config.timeout_s}.items():
        if not 0 < number < float("inf"):
            raise ConfigError(f"{name}={number} must be a finite number greater than 0")
    if not 0 < config.data.heldout_share < 1:
        raise ConfigError(f"data.heldout_share={config.data.heldout_share} must lie between 0 and 1")
    if rollout.samples_per_task and max(config.ks, default=0) > rollout.samples_per_task:
        raise ConfigError(
            f"ks={list(config.ks)} with rollout.samples_per_task={rollout.samples_per_task}: there are not as many "
            "answers to a question, raise the one or lower the other"
        )
    if not rollout.samples_per_task and set(test_time.methods) - {"reflect"}:
        raise ConfigError(
            f"test_time.methods={list(test_time.methods)} with rollout.samples_per_task=0: a vote and best_of_n need "
            "several answers to each question"
        )
    if not config.items and not config.benchmark:
        raise ConfigError("items=0 and benchmark=none: nothing is left to evaluate, raise items or choose a benchmark")
    if config.judge.verifier not in config.verifiers:
        raise ConfigError(
            f"judge.verifier={shown(config.judge.verifier)} is no key of verifiers"
            f"{nearest(config.judge.verifier, config.verifiers)}"
        )
    if rollout.backend.get("weights", "same") != "same":
        raise ConfigError(
            f"rollout.backend.weights={shown(rollout.backend['weights'])}: without a trainer the weights are those of "
            "the files, set it to same"
        )
    asked = {"rollout.max_new_tokens": rollout.max_new_tokens}
    check_sampler(rollout.backend, config.model, ("ranks", config.ranks), asked)
