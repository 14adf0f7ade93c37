"""The schema of the settings tree: types alone. Values live in conf/, checks in ``checks``.

Strategies (advantage, losses, schedules, recycler, verifiers, backends, the loop itself) are ``_target_`` nodes: the
yaml names the class and its arguments, and ``Node`` fields hold them untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from spark_megatron.architecture import Layout
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
    heldout: Node | None
    heldout_share: float
    max_prompt_tokens: int | None
    overlong: Literal["drop", "cut"]


@dataclass(frozen=True)
class CurriculumConfig:
    order: Node
    resample: Node | None


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
    curriculum: CurriculumConfig
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
    label_noise: Node

    @property
    def scored(self) -> bool:
        """Whether the training loop works with the reward model."""
        return self.trainer.loop.get("_target_") in SCORED
