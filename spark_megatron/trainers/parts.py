"""Everything a training loop works with, built once from the settings."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from spark_megatron import runtime
from spark_megatron.algos.advantages import Advantage
from spark_megatron.algos.kl import KLEstimator
from spark_megatron.algos.kl_schedules.base import KLSchedule
from spark_megatron.algos.mismatch import Correction
from spark_megatron.algos.policy_loss import PolicyLoss
from spark_megatron.algos.weight_schedules.base import WeightSchedule
from spark_megatron.config import Config, OptimConfig
from spark_megatron.data.chat import encode_prompt
from spark_megatron.data.curriculum import Resample
from spark_megatron.data.limit import PromptLimit
from spark_megatron.data.stream import TaskStream
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.model import DTYPES
from spark_megatron.engine.optim import OptimSettings
from spark_megatron.engine.parallel import Parallel
from spark_megatron.eval.suite import Suite
from spark_megatron.hybrid.handoff import Hybrid
from spark_megatron.hybrid.proof import Probe
from spark_megatron.recycle.mixture import Recycler
from spark_megatron.recycle.pool import Pool
from spark_megatron.rewards.noise import LabelNoise
from spark_megatron.rewards.protocol import Verifier
from spark_megatron.rewards.scoring import score_groups
from spark_megatron.rollout.groups import Phase, sample_groups
from spark_megatron.rollout.lengths import ResponseLengths
from spark_megatron.tracking.console import ConsoleSink
from spark_megatron.tracking.hacking import HackingMonitor
from spark_megatron.tracking.recorder import Recorder
from spark_megatron.tracking.sinks import JsonlSink, Sink
from spark_megatron.tracking.tracker import Tracker
from spark_megatron.tracking.wandb_sink import WandbSink
from spark_megatron.trainers.reward_model import RewardModel
from spark_megatron.types import Task


@dataclass
class Parts:
    """The parts of a run. Algorithms are pure; engine and hybrid own the model, the rest owns text."""

    tokenizer: PreTrainedTokenizerBase
    stream: TaskStream
    resample: Resample | None
    verifiers: Mapping[str, Verifier]
    label_noise: LabelNoise
    recycler: Recycler
    pool: Pool
    demonstrations: Any
    advantage: Advantage
    policy_loss: PolicyLoss
    correction: Correction | None
    kl_estimator: KLEstimator
    kl_schedule: KLSchedule
    weight_schedule: WeightSchedule
    engine: Engine
    reward_model: RewardModel | None
    hybrid: Hybrid
    suite: Suite
    track: Tracker
    rng: random.Random
    timeout_s: float
    lengths: ResponseLengths = field(default_factory=ResponseLengths)
    phases: list[Phase] = field(default_factory=list)
    """The sampling phases of the open step."""

    def sample(
        self, tasks: Sequence[Task], *, n: int, temperature: float, max_new_tokens: int, seed: tuple[object, ...]
    ) -> Phase:
        """Checked groups of ``tasks`` from the current weights, on every rank (a collective)."""
        with self.hybrid.generating() as sampler:
            return sample_groups(
                sampler,
                self.tokenizer,
                tasks,
                partial(score_groups, verifiers=self.verifiers),
                self.lengths,
                n=n,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=seed,
                timeout_s=self.timeout_s,
            )


def stop_tokens(directory: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All ids that end a response: the tokenizer's and those of generation_config.json (else of config.json)."""
    if (Path(directory) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(directory).eos_token_id
    else:
        eos = AutoConfig.from_pretrained(directory).eos_token_id
    stops = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return sorted(stop for stop in stops if stop is not None)


def _updates(cfg: Config) -> int:
    """Optimiser updates of the policy in a run."""
    periods = 2 if cfg.objective.update == "alternating" else 1
    return cfg.trainer.total_steps * cfg.objective.updates_per_period * periods


def _optim_settings(o: OptimConfig, updates: int) -> OptimSettings:
    """``updates`` are those of the run, over which the rate decays unless the settings say otherwise."""
    return OptimSettings(
        lr=o.lr,
        min_lr=o.min_lr,
        decay=o.decay,
        decay_updates=o.decay_updates or updates,
        warmup_updates=o.warmup_updates,
        weight_decay=o.weight_decay,
        betas=o.betas,
        eps=o.eps,
        clip_grad=o.clip_grad,
        wsd_updates=o.wsd_updates,
        frozen=o.frozen,
        offload=o.offload,
    )


def _tracker(cfg: Config) -> Tracker:
    sinks: list[Sink] = []
    recorder = None
    if runtime.rank() == 0:
        run_dir = Path(cfg.run_dir)
        sinks = [JsonlSink(path=run_dir / "metrics.jsonl"), ConsoleSink(total_steps=cfg.trainer.total_steps, every=1)]
        if cfg.tracking.wandb != "disabled":
            sinks.append(
                WandbSink(
                    mode=cfg.tracking.wandb,
                    project=cfg.tracking.wandb_project,
                    name=cfg.name,
                    fallback="offline",
                    timeout_s=30.0,
                    directory=run_dir,
                    config=asdict(cfg),
                )
            )
        recorder = Recorder(path=run_dir / "rollouts.jsonl", groups=cfg.tracking.record_groups)
    return Tracker(sinks=sinks, recorder=recorder, total_steps=cfg.trainer.total_steps)


def _reward_model(cfg: Config, policy: Engine) -> RewardModel:
    settings = cfg.reward_model
    runtime.say(f"loading {settings.path} as the reward model")
    engine = Engine(
        settings.path,
        policy.parallel,
        DTYPES[cfg.model.dtype],
        _optim_settings(settings.optim, cfg.trainer.total_steps),
        bucket_bytes=policy.bucket_bytes,
        logits_bytes=int(cfg.engine.logits_mb * 2**20),
        score_seed=settings.score_seed,
    )
    return RewardModel(
        engine,
        AutoTokenizer.from_pretrained(settings.path),
        assistant=instantiate(cfg.assistant),
        triples=instantiate(cfg.triples),
        max_tokens=cfg.trainer.max_tokens_per_microbatch,
        released=cfg.engine.release,
        monitor=HackingMonitor(rise=settings.monitor.rise, drop=settings.monitor.drop),
    )


def build(cfg: Config) -> Parts:
    """All parts of a run. A collective: every rank builds its own share."""
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    most = cfg.data.max_prompt_tokens
    stream = TaskStream(
        source=instantiate(cfg.data.source),
        seed=cfg.seed,
        heldout_share=cfg.data.heldout_share,
        order=instantiate(cfg.curriculum.order),
        heldout_source=instantiate(cfg.data.heldout),
        limit=None if most is None else PromptLimit(tokenizer, most, cfg.data.overlong),
    )
    heldout = stream.heldout(cfg.eval.items)
    bank = instantiate(cfg.recycle["bank"])
    suite = Suite.build(heldout, bank=bank, judge_verifier=cfg.recycle["judge_verifier"], rounds=cfg.eval.rounds)

    layout = cfg.parallel.layout
    runtime.say(f"loading {cfg.model.path} into megatron-core ({layout})")
    engine = Engine(
        cfg.model.path,
        Parallel(layout),
        DTYPES[cfg.model.dtype],
        _optim_settings(cfg.optim, _updates(cfg)),
        bucket_bytes=int(cfg.engine.bucket_mb * 2**20),
        logits_bytes=int(cfg.engine.logits_mb * 2**20),
    )
    runtime.say("starting the sampler")
    sampler = instantiate(
        cfg.rollout.backend,
        model=cfg.model.path,
        tokenizer=tokenizer,
        dtype=cfg.model.dtype,
        stop_tokens=stop_tokens(cfg.model.path, tokenizer),
    )
    probe = Probe(
        prompts=tuple(encode_prompt(tokenizer, task) for task in heldout[: cfg.rollout.probe_prompts]),
        new_tokens=cfg.rollout.probe_tokens,
        bound=cfg.rollout.max_logprob_error,
        every=cfg.rollout.probe_every,
        compare_every=cfg.rollout.compare_every,
    )
    return Parts(
        tokenizer=tokenizer,
        stream=stream,
        resample=instantiate(cfg.curriculum.resample),
        verifiers=instantiate(cfg.verifiers),
        label_noise=instantiate(cfg.label_noise),
        recycler=instantiate(cfg.recycle),
        pool=Pool(max_size=cfg.objective.pool_size),
        demonstrations=instantiate(cfg.demonstrations),
        advantage=instantiate(cfg.advantage),
        policy_loss=instantiate(cfg.policy_loss),
        correction=instantiate(cfg.correction),
        kl_estimator=instantiate(cfg.objective.kl_estimator),
        kl_schedule=instantiate(cfg.kl_schedule),
        weight_schedule=instantiate(cfg.weight_schedule),
        engine=engine,
        reward_model=_reward_model(cfg, engine) if cfg.scored else None,
        hybrid=Hybrid(engine, sampler, probe, cfg.engine.release, cfg.engine.timeout_s),
        suite=suite,
        track=_tracker(cfg),
        rng=random.Random(f"{cfg.seed}:recycling and shuffling"),
        timeout_s=cfg.engine.timeout_s,
    )
