"""A whole run: evaluate, train, evaluate, save the model, draw the report."""

from __future__ import annotations

from pathlib import Path

from hydra.utils import instantiate

from spark_megatron import runtime
from spark_megatron.config import Config
from spark_megatron.eval.suite import as_json
from spark_megatron.report.report import make_report
from spark_megatron.trainers import parts as building
from spark_megatron.trainers import progress
from spark_megatron.trainers.saves import Saves
from spark_megatron.trainers.state import REWARD_MODEL


def run(cfg: Config, checkpoint: Path | None) -> None:
    """Execute the run that ``cfg`` describes on all ranks; results are in ``cfg.run_dir``.

    It goes on from ``checkpoint``, or begins with the start model where that is None.
    """
    runtime.seed_all(cfg.seed)
    parts = building.build(cfg)
    if parts.label_noise.active:
        runtime.say(parts.label_noise.warning)
    saves = Saves(cfg, parts, checkpoint)
    state = saves.state
    try:
        if state.before is None:
            runtime.say(f"evaluating {cfg.eval.items} held-out tasks before training")
            state.before = as_json(progress.evaluate(parts, cfg))
        progress.write_evaluation(cfg, "before", state.before)
        instantiate(cfg.trainer.loop)(cfg, parts, saves)
        saves.wait()
        with parts.hybrid.training() as engine:
            engine.save_hf(Path(cfg.run_dir) / "model")
            if parts.reward_model:
                with parts.reward_model.awake() as scorer:
                    scorer.save_hf(Path(cfg.run_dir) / REWARD_MODEL / "model")
        runtime.say("evaluating after training")
        # Last of the results: from here on the run counts as finished.
        progress.write_evaluation(cfg, "after", {"step": state.step, **as_json(progress.evaluate(parts, cfg))})
    finally:
        parts.track.close()
        parts.hybrid.sampler.close()
    if runtime.rank() == 0:
        make_report(cfg.run_dir)
