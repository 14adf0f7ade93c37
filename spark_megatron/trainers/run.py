"""A whole run: evaluate, train, evaluate, save the model, draw the report."""

from __future__ import annotations

from pathlib import Path

from hydra.utils import instantiate

from spark_megatron import runtime
from spark_megatron.config import Config
from spark_megatron.report.report import make_report
from spark_megatron.trainers import parts as building
from spark_megatron.trainers import progress


def run(cfg: Config) -> None:
    """Execute the run that ``cfg`` describes on all ranks; results are in ``cfg.run_dir``."""
    runtime.seed_all(cfg.seed)
    parts = building.build(cfg)
    try:
        runtime.say(f"evaluating {cfg.eval.items} held-out tasks before training")
        progress.write_evaluation(cfg, "before", progress.evaluate(parts, cfg))
        instantiate(cfg.trainer.loop)(cfg, parts)
        runtime.say("evaluating after training")
        progress.write_evaluation(cfg, "after", progress.evaluate(parts, cfg))
        parts.engine.save_hf(Path(cfg.run_dir) / "model")
    finally:
        parts.track.close()
        parts.hybrid.sampler.close()
    if runtime.rank() == 0:
        make_report(cfg.run_dir)
