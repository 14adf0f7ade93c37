"""What the ranks of the kill test run: a short training loop that saves every step and goes on where it was."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from spark_megatron.engine import checkpoint_write
from spark_megatron.engine.checkpoint import Checkpoints, load, read_state
from spark_megatron.engine.parallel import Layout
from tests import training_rows as step
from tests.engine.ranks_checkpoint import weights
from tests.engine.ranks_engine import SETTINGS, engine_of, layout


def never_written(model: Path, target: Path) -> None:
    """A save whose writing does not end."""
    with layout(Layout()) as parallel, mock.patch.object(checkpoint_write, "_write_items") as write:
        write.side_effect = lambda *_: time.sleep(1e6)
        checkpoints = Checkpoints(target, keep=1, asynchronous=True)
        checkpoints.save(engine_of(parallel, model), 1, {})
        print("now waiting", flush=True)
        checkpoints.wait()


def train(model: Path, target: Path, updates: int, saving: bool) -> dict[str, Tensor]:
    """The weights after that many updates. What each one learns from is drawn from the random state."""
    with layout(Layout(pipeline=2)) as parallel:
        engine = engine_of(parallel, model, torch.float32, replace(SETTINGS, decay_updates=60))
        checkpoints = Checkpoints(target, keep=2, asynchronous=True)
        random.seed(3)
        done, start = 0, checkpoints.latest()
        if start is not None:
            load(engine, start)
            done = read_state(start)["step"]
        print("now", "begins", done, flush=True)
        while done < updates:
            batches = step.batches_of(random.sample(step.samples(), 4), 1_000)
            for batch, logprobs in zip(batches, engine.logprobs(batches, step.TEMPERATURE), strict=True):
                batch.old_logprobs = batch.ref_logprobs = logprobs
            engine.update(batches, step.LOSS, step.TEMPERATURE)
            done += 1
            print("now", "updated", done, flush=True)
            checkpoints.poll()
            if saving:
                checkpoints.save(engine, done, {"step": done})
                print("now", "saving", done, flush=True)
        checkpoints.wait()
        return weights(engine)
