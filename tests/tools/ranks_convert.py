"""What the ranks of the conversion tests run: a checkpoint from two ranks, and its conversion on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spark_megatron.engine.checkpoint import CheckpointError, Checkpoints
from spark_megatron.engine.parallel import Layout
from spark_megatron.rollout.base import Request
from tests import tiny_models
from tests.engine import ranks_engine as engines
from tests.rollout import ranks_vllm
from tools import convert

PROMPT, NEW = (5, 40, 7, 133, 20), 12


def saved(model: Path, checkpoints: Path) -> dict[str, torch.Tensor]:
    """One update at TP=2, saved with the optimizer; the weights then, on rank 0."""
    with engines.layout(Layout(tensor=2, sequence=True)) as parallel:
        engine = engines.engine_of(parallel, model)
        engines.training(engine, updates=1)
        state = {"config": {"model": {"path": str(model), "dtype": "fp32"}}}
        Checkpoints(checkpoints, keep=1, asynchronous=False).save(engine, 1, state)
        return engines.exported(engine)


def converted(model: Path, checkpoint: Path, out: Path) -> dict[str, Any]:
    """Both directions, what is refused, and what vLLM makes of the directory from disk."""
    said = [
        convert.to_hf(checkpoint, out / "hf", None, verify=True),
        convert.to_megatron(model, out / "megatron", "fp32", verify=True),
        convert.to_hf(out / "megatron" / "step_00000000", out / "back", None, verify=True),
        convert.to_megatron(model, out / "half", "bf16", verify=True),
    ]
    return {
        "said": said,
        "spoiled": refusal(lambda: convert.same(convert.Model(model, "fp32"), out / "hf")),
        "nameless": refusal(lambda: convert.to_hf(nameless(model, out), out / "x", None, verify=False)),
        "no checkpoint": refusal(lambda: convert.to_hf(model, out / "x", None, verify=False)),
        "vllm": from_disk(out / "hf"),
    }


def refusal(action: Any) -> str:
    try:
        action()
    except (convert.Stopped, CheckpointError) as error:
        return str(error)
    return "accepted"


def nameless(model: Path, out: Path) -> Path:
    """A checkpoint that does not say where it comes from."""
    of = convert.Model(model, "fp32")
    checkpoints = Checkpoints(out / "nameless", keep=1, asynchronous=False)
    checkpoints.save_weights(of.chunks, of.parallel, {})
    found = checkpoints.latest()
    assert found is not None
    return found


def from_disk(directory: Path) -> float:
    """The largest difference of a log-prob between vLLM, which reads the directory itself, and transformers."""
    sampler = ranks_vllm.sampler(directory, read_weights=True)
    [[rollout]] = sampler.generate([Request(PROMPT, 1, 1.0, NEW, seed=3)])
    expected = tiny_models.response_logprobs(tiny_models.load(directory), PROMPT, rollout.tokens, 1.0)
    return float((torch.tensor(rollout.logprobs) - expected).abs().max())
