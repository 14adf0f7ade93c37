"""When a run is saved, and how it goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from spark_megatron.config import Config
from spark_megatron.engine import checkpoint
from spark_megatron.trainers.parts import Parts
from spark_megatron.trainers.state import FOLDER, REWARD_MODEL, RunState


class Saves:
    """The checkpoints of a run and the state that they hold; every call is a collective.

    ``start`` is the checkpoint to go on from, None for the start model. Its state is in ``state`` from the beginning;
    its weights come with ``restore``.
    """

    def __init__(self, cfg: Config, parts: Parts, start: Path | None) -> None:
        folder = Path(cfg.run_dir) / FOLDER
        self._every, self._total = cfg.checkpoint.every, cfg.trainer.total_steps
        self._hybrid, self._start, self._reward_model = parts.hybrid, start, parts.reward_model
        self._checkpoints = checkpoint.Checkpoints(
            folder, keep=cfg.checkpoint.keep, asynchronous=cfg.checkpoint.asynchronous
        )
        # One more, so that a reward model is there for every checkpoint of the policy, whenever a run is killed.
        beside = folder.parent / REWARD_MODEL / FOLDER
        self._scorers = checkpoint.Checkpoints(beside, keep=cfg.checkpoint.keep + 1, asynchronous=False)
        self.state = RunState(cfg, parts)
        if start is not None:
            self.state.load_state_dict(checkpoint.read_state(start))
            if start.parent != folder:
                self.state.origin = str(start)

    def restore(self) -> RunState:
        """The state to go on with; the engine has its weights and optimizer from now on.

        What belongs to the start model, a reference policy above all, is taken from the engine before.
        """
        if self._start is not None:
            with self._hybrid.training() as engine:
                if self._reward_model:
                    with self._reward_model.awake() as scorer:
                        checkpoint.load(scorer, self._start.parents[1] / REWARD_MODEL / FOLDER / self._start.name)
                checkpoint.load(engine, self._start)
        return self.state

    def step_done(self) -> None:
        """Count a finished step, and save where one is due: every ``checkpoint.every`` steps and after the last one."""
        self.state.step += 1
        self._checkpoints.poll()
        if self.state.step == self._total or (self._every and self.state.step % self._every == 0):
            with self._hybrid.training() as engine:
                if self._reward_model:
                    with self._reward_model.awake() as scorer:
                        self._scorers.save(scorer, self.state.step, {})
                self._checkpoints.save(engine, self.state.step, self.state.state_dict())

    def wait(self) -> None:
        """Until everything is written; CheckpointError where a save failed."""
        self._checkpoints.wait()
