"""What the ranks of the hand-over tests run: real training engines, real samplers, and planted faults."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from spark_megatron import runtime
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.optim import OptimSettings
from spark_megatron.engine.parallel import Parallel
from spark_megatron.hybrid import transfer
from spark_megatron.hybrid.handoff import HandoffError, Hybrid
from spark_megatron.hybrid.proof import Probe
from spark_megatron.rollout import weight_transfer
from spark_megatron.rollout.base import Request, Sampler
from spark_megatron.rollout.vllm import VLLMSampler
from tests import training_rows as step
from tests.engine.ranks_engine import layout
from tests.hybrid.cases import CASES
from tests.rollout.ranks_groups import byte_tokenizer, scripted
from tests.rollout.ranks_vllm import engine_arguments, prompt, sampler

PROBE = Probe(
    tuple(prompt(length, seed=length) for length in (6, 17, 30)), new_tokens=4, bound=1e-3, every=1, compare_every=1
)
REQUESTS = [Request(prompt(length, seed=length), 1, 0.0, 5, seed=1000 * length) for length in (5, 20, 140)]
SETTINGS = OptimSettings(**step.OPTIM | {"lr": 5e-3, "decay": "constant", "warmup_updates": 0})
RELEASE = ("optimizer", "gradients", "parameters")
TIMEOUT_S = 300.0


def on_all_layouts(models: dict[str, Path], out: Path) -> dict[Any, Any]:
    """Each case of this world size: what was handed over after some updates and what was sampled then."""
    answers: dict[Any, Any] = {}
    for (model, dtype, degree), layouts in CASES[dist.get_world_size()].items():
        to = sampler(models[model], dtype=dtype, tensor_parallel=degree)
        for number, degrees in enumerate(layouts):
            with layout(degrees) as parallel:
                engine = engine_of(models[model], parallel, dtype)
                target = out / f"{model}_{dtype}_{degree}_{number}"
                answers[model, dtype, degree, number] = updated(engine, to, target)
                if (model, degree) == ("qwen2", 1) and dist.get_world_size() == 2 and number == 0:
                    answers["faults"] = faults(engine, to)
                    answers["turns"] = turns(engine, to)
                    answers["without_model"] = without_model(engine)
                    answers["hung"] = hung(engine)
                    answers["settings"] = settings(engine, to)
                if (model, degree, number) == ("qwen3_moe_mixed", 2, 0):
                    answers["expert_faults"] = expert_faults(engine, to)
        # Leaving vLLM's process groups leaves those of all its engines: this comes last.
        answers[model, dtype, degree, "fresh"] = fresh(target, dtype, degree)
    return answers


def engine_of(path: Path, parallel: Parallel, dtype: str = "fp32") -> Engine:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    return Engine(path, parallel, kind, SETTINGS, bucket_bytes=60_000, logits_bytes=60_000)


def learn(engine: Engine) -> None:
    rows, parallel = step.samples(), engine.parallel
    batches = step.batches_of(rows, 400, parallel.data, parallel.data_rank)
    for batch, logprobs in zip(batches, engine.logprobs(batches, step.TEMPERATURE), strict=True):
        batch.old_logprobs = batch.ref_logprobs = logprobs
    engine.update(batches, step.LOSS, step.TEMPERATURE)


def sampled(to: Sampler) -> list[tuple[Any, ...]]:
    return list(zip(REQUESTS, to.generate(REQUESTS), strict=True))


def tokens(answer: list[tuple[Any, ...]]) -> list[Any]:
    return [[r.tokens for r in group] for _, group in answer]


def updated(engine: Engine, to: Sampler, target: Path) -> dict[str, Any]:
    """Update three times and hand over to a sampler that holds other weights; what is sampled then, and what moved."""
    to.weight_version = -1  # the sampler may hold another engine's weights under the same number
    bound = 1e-3 if next(iter(engine.placement.local.values())).dtype == torch.float32 else 0.5
    hybrid = Hybrid(engine, to, replace(PROBE, bound=bound), RELEASE, TIMEOUT_S)
    sent = 0

    def counted(work: Sequence[Any]) -> list[Any]:
        nonlocal sent
        sent += sum(op.tensor.numel() for op in work if op.op is dist.irecv)
        return original(work)

    original = dist.batch_isend_irecv
    with hybrid.training():
        for _ in range(3):
            learn(engine)
    move = hybrid._move_weights

    def watched() -> None:
        with mock.patch.object(dist, "batch_isend_irecv", counted):
            move()

    with mock.patch.object(hybrid, "_move_weights", watched), hybrid.generating() as sampling:
        answer = sampled(sampling)
    with hybrid.training():
        engine.save_hf(target)
    return {
        "rollouts": answer,
        "target": target,
        "probe_error": hybrid.last["probe_max_abs"],
        "bytes": (sent, hybrid.transfer.bytes),
        "staging": hybrid.transfer.staging,
        "version": engine.weight_version,
    }


def fresh(directory: Path, dtype: str, degree: int) -> Any:
    """The same requests to a new vLLM that loads the exported directory by itself."""
    with engine_arguments(load_format="auto"):
        other = sampler(directory, dtype=dtype, tensor_parallel=degree)
    other.weight_version = 0
    answer = sampled(other)
    other.close()
    return answer


def turns(engine: Engine, to: VLLMSampler) -> dict[str, Any]:
    """Who holds what in whose turn, in which order; and how often weights move."""
    too_long = prompt(2 * to.max_model_len, seed=1)
    hybrid = Hybrid(engine, to, replace(PROBE, prompts=(too_long, *PROBE.prompts)), RELEASE, TIMEOUT_S)
    calls: list[str] = []
    watched = [(to, name) for name in ("sleep", "wake", "start_update", "finish_update", "differing")]
    watched += [(engine, name) for name in ("release", "restore")]
    with ExitStack() as stack:
        for owner, name in watched:
            stack.enter_context(mock.patch.object(owner, name, noted(calls, name, getattr(owner, name))))
        stack.enter_context(mock.patch.object(to, "sleep_level", 2))
        to.weight_version = -1
        with hybrid.generating():
            gradients = sum(x.untyped_storage().nbytes() for x in engine._gradients())
            first = tokens(sampled(to))
            with hybrid.generating():
                again = tokens(sampled(to))
        with hybrid.training():
            lost = to.weight_version
            try:
                to.generate(REQUESTS)
                asleep = "sampled"
            except RuntimeError as error:
                asleep = str(error)
            order, figures = list(calls), dict(hybrid.turns[0])
            learn(engine)
        cycles = []
        for _ in range(3):
            with hybrid.generating():
                cycles.append(tokens(sampled(to)))
            with hybrid.training():
                pass
        with hybrid.generating():
            pass
    return {
        "order": order,
        "gradients": gradients,
        "repeats": first == again,
        "cycles": cycles,
        "lost": lost,
        "asleep": asleep,
        "figures": figures,
    }


def noted(calls: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.append(" ".join([name, *(str(a) for a in arguments if isinstance(a, str))]))
        return original(*arguments)

    return call


Shipped = Iterator[dict[str, Tensor]]


def swapped(shipped: Shipped) -> Shipped:
    """Gate and up projection of one layer in each other's place."""
    for shards in shipped:
        yield {
            name: torch.cat(tensor.chunk(2)[::-1]) if name == "model.layers.1.mlp.gate_up_proj.weight" else tensor
            for name, tensor in shards.items()
        }


def wrong_slice(shipped: Shipped) -> Shipped:
    """The key of one layer shifted by a row."""
    for shards in shipped:
        name = "model.layers.3.self_attn.qkv_proj.weight"
        if name in shards:
            shards = shards | {name: shards[name].clone()}
            shards[name][128:192] = shards[name][129:193].clone()
        yield shards


def dropped(shipped: Shipped) -> Shipped:
    """Without one attention output."""
    yield from (shards for shards in shipped if "model.layers.2.self_attn.o_proj.weight" not in shards)


def faults(engine: Engine, to: VLLMSampler) -> dict[str, Any]:
    """Each fault on a hand-over of newly learned weights, then the same hand-over without it."""

    def spoil(by: Callable[[Shipped], Shipped]) -> Callable[[], Any]:
        run = transfer.Transfer.run
        return lambda: mock.patch.object(transfer.Transfer, "run", lambda self: by(run(self)))

    return planted(
        engine,
        to,
        {
            "swapped": spoil(swapped),
            "wrong slice": spoil(wrong_slice),
            "dropped": spoil(dropped),
            "nothing": spoil(lambda shipped: iter(())),
            "stale head": lambda: mock.patch.object(weight_transfer, "repack_tied_head"),
            "stale cache": lambda: mock.patch.object(to.llm, "reset_prefix_cache", return_value=True),
        },
    )


def expert_faults(engine: Engine, to: VLLMSampler) -> dict[str, Any]:
    return planted(engine, to, {"stale experts": lambda: mock.patch.object(weight_transfer, "forget_expert_kernels")})


def planted(engine: Engine, to: VLLMSampler, plants: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    # Tensors are compared when the log-probs tell that something is wrong.
    hybrid = Hybrid(engine, to, replace(PROBE, compare_every=0), RELEASE, TIMEOUT_S)
    with hybrid.generating():
        pass
    answers = {}
    for name, plant in plants.items():
        with hybrid.training():
            learn(engine)
        message = "accepted"
        with plant():
            try:
                with hybrid.generating():
                    pass
            except HandoffError as error:
                message = str(error)
        error = hybrid.last.get("probe_max_abs")
        refused = to.weight_version
        with hybrid.generating():
            answers[name] = {
                "message": message,
                "error": error,
                "refused": refused,
                "version": engine.weight_version,
                "after": hybrid.last["probe_max_abs"],
            }
    with hybrid.training():
        return answers


def without_model(engine: Engine) -> int:
    """How far the version of a sampler without a model is from the trainer's after a hand-over."""
    hybrid = Hybrid(engine, scripted(byte_tokenizer(), ["1"]), PROBE, RELEASE, TIMEOUT_S)
    with hybrid.generating() as sampling:
        return sampling.weight_version - engine.weight_version


def hung(engine: Engine) -> int:
    """The code with which the process would have ended because a sampler does not take its weights."""
    to, codes, found = scripted(byte_tokenizer(), ["1"]), Queue[int](), []
    hybrid = Hybrid(engine, to, PROBE, RELEASE, 0.3)

    def wait() -> None:
        found.append(codes.get(timeout=60))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "_exit", codes.put))
        stack.enter_context(mock.patch.object(runtime, "_LAST_RESORT_S", 1000.0))
        stack.enter_context(mock.patch.object(to, "start_update", wait))
        with hybrid.generating():
            pass
    faulthandler.cancel_dump_traceback_later()
    return found[0]


def settings(engine: Engine, to: VLLMSampler) -> dict[str, Any]:
    """Five turns with an update before each: what is released, compared and moved under other settings."""
    every_other = Hybrid(engine, to, replace(PROBE, every=2, compare_every=3), ("gradients",), TIMEOUT_S)
    to.weight_version = -1
    calls: list[str] = []
    compared = []
    with ExitStack() as stack:
        for owner, name in ((engine, "release"), (to, "differing")):
            stack.enter_context(mock.patch.object(owner, name, noted(calls, name, getattr(owner, name))))
        for _ in range(5):
            calls.clear()
            with every_other.generating():
                compared.append("differing" in calls)
            with every_other.training():
                learn(engine)
        released = [call for call in calls if call.startswith("release")]
    kept = Hybrid(engine, to, PROBE, (), TIMEOUT_S)
    with mock.patch.object(to, "sleep_level", 0):
        for _ in range(2):
            with kept.generating():
                pass
            with kept.training():
                pass
    return {
        "probed": ["probe_max_abs" in turn for turn in every_other.turns],
        "compared": compared,
        "released": released,
        "bytes": [turn["released_bytes"] for turn in (*every_other.turns, *kept.turns)],
        "moved": ["handoff_s" in turn for turn in kept.turns],
    }
