"""Supervised fine-tuning on generated demonstrations: the cold start that teaches the formats of all task kinds."""

from __future__ import annotations

from functools import partial

from spark_megatron.algos.unified import component_coefs
from spark_megatron.config import Config
from spark_megatron.data.samples import supervised_samples
from spark_megatron.trainers import progress
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.period import update
from spark_megatron.trainers.saves import Saves
from spark_megatron.types import TASK_KINDS


def train(cfg: Config, parts: Parts, saves: Saves) -> None:
    """``tasks_per_step`` fresh demonstrations a step, token mean of the cross-entropy on their responses."""
    components = dict.fromkeys(TASK_KINDS, "sft")
    state = saves.restore()
    for step in range(state.step, cfg.trainer.total_steps):
        with parts.track.step(step + 1) as span:
            tasks = parts.stream.take(cfg.trainer.tasks_per_step)
            pairs = [parts.demonstrations(task, parts.rng) for task in tasks]
            stats = update(
                parts,
                cfg,
                samples=supervised_samples(pairs, parts.tokenizer, components),
                token_weight=partial(component_coefs, {"sft": 1.0}),
                reference=None,
                kl_coef=0.0,
                span=span,
            )
            parts.track.log({f"sft/{name}": stats[name] for name in ("loss", "grad_norm", "lr")})
            parts.track.log({"tokens/trained": stats["tokens"]})
            if cfg.trainer.eval_every and (step + 1) % cfg.trainer.eval_every == 0:
                with span("eval"):
                    progress.log_evaluation(parts, cfg, state)
        saves.step_done()
