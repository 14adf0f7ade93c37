"""The cold start of a reward model: binary cross-entropy on labelled completions."""

from __future__ import annotations

from spark_megatron.config import Config
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.saves import Saves


def train(cfg: Config, parts: Parts, saves: Saves) -> None:
    """``tasks_per_step`` triples a step; the policy is left as it is."""
    judge = parts.reward_model
    assert judge is not None
    state = saves.restore()
    for step in range(state.step, cfg.trainer.total_steps):
        with parts.track.step(step + 1) as span:
            triples = judge.triples.take(step, cfg.trainer.tasks_per_step, cfg.seed)
            with span("reward_model"), parts.hybrid.training(), judge.awake():
                stats = judge.learn_labels(triples)
            parts.track.log({f"reward_model/{name}": value for name, value in stats.items()})
        saves.step_done()
