"""What the ranks of the vLLM tests run: hand-overs as the trainer makes them, and some with a cure switched off."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
import vllm
from safetensors.torch import load_file
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from spark_megatron.architecture import Architecture
from spark_megatron.hybrid.proof import shards_of
from spark_megatron.rollout import vllm as backend
from spark_megatron.rollout import weight_transfer
from spark_megatron.rollout.base import Request, Sampler
from spark_megatron.rollout.fit import kv_cache_bytes
from spark_megatron.rollout.vllm import VLLMSampler
from spark_megatron.types import Rollout

Answer = list[tuple[Request, tuple[Rollout, ...]]]
_kept: list[VLLMSampler] = []
"""vLLM tears torch.distributed down when an engine is collected: all of them live until the process ends."""

_plain_distributed_args = ExecutorWithExternalLauncher._distributed_args


_stops: list[int] = []


class Numbers:
    """A tokenizer whose text is the token ids; stop tokens are special."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(str(t) for t in tokens if not (skip_special_tokens and t in _stops))


@contextlib.contextmanager
def engine_arguments(**changed: Any) -> Iterator[None]:
    """Build vLLM engines with other arguments than the backend's own."""
    original = vllm.LLM

    def build(**arguments: Any) -> Any:
        return original(**arguments | changed)

    with mock.patch.object(vllm, "LLM", build):
        yield


def sampler(model: Path, **changed: Any) -> VLLMSampler:
    settings: dict[str, Any] = {
        "dtype": "fp32",
        "stop_tokens": _stops,
        "tensor_parallel": 1,
        "max_model_len": 512,
        "max_sequences": 32,
        "max_batched_tokens": 2048,
        "kv_cache_mb": 64,
        "prefix_cache": True,
        "sleep_level": 0,
        "weights": "same",
    }
    made = VLLMSampler(model=str(model), tokenizer=Numbers(), **settings | changed)
    _kept.append(made)
    return made


def hand_over(to: Sampler, directory: Path, version: int, order: int = 1) -> None:
    """Module by module, in the order of the file's tensors or (-1) the reverse."""
    model = Architecture.of(json.loads((directory / "config.json").read_text()))
    tensors = ([item] for item in list(load_file(directory / "model.safetensors").items())[::order])
    to.start_update()
    for shards in shards_of(tensors, to.rows(model), to.tensor_parallel, dist.get_rank() % to.tensor_parallel):
        to.load(shards)
    to.finish_update(version)


def smallest_mb(directory: Path) -> int:
    """What is accepted before a start, for sequences of 512 tokens."""
    model = Architecture.of(json.loads((directory / "config.json").read_text()))
    return -(-kv_cache_bytes(model, "fp32", 1, 512) // 2**20)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 280) for _ in range(length))


def ask(of: VLLMSampler, lengths: Sequence[int], n: int = 2, temperature: float = 0.7, new: int = 8) -> Answer:
    requests = [Request(prompt(length, i), n, temperature, new, seed=1000 * i) for i, length in enumerate(lengths)]
    return list(zip(requests, of.generate(requests), strict=True))


def random_states() -> list[Any]:
    return [random.getstate()[1][:5], numpy.random.get_state()[1][:5].tolist(), torch.get_rng_state()[:64].tolist()]


def one_rank(models: dict[str, tuple[Path, Path]], dense: Sequence[str], stops: Sequence[int]) -> dict[str, Any]:
    """All checks that need one rank. ``models`` has two directories (first weights, second weights) per family."""
    _stops.extend(stops)
    answers: dict[str, Any] = {"updated": {}, "shapes": {}}
    answers |= tied(*models["qwen2"])
    for name in dense:
        first, second = models[name]
        made = sampler(first)
        hand_over(made, first, 0)
        ask(made, [20])
        hand_over(made, second, 1, order=-1)
        answers["updated"][name] = ask(made, [5, 20, 140])
        answers["shapes"][name] = load_shapes(made)
        made.close()
    answers["experts"] = experts(*models["qwen3_moe"])
    answers |= without_construction_cures(*models["qwen2"])
    answers["after_close"] = (dist.is_initialized(), dist.get_world_size())
    try:
        sampler(models["qwen2"][0], kv_cache_mb=smallest_mb(models["qwen2"][0]) - 1)
    except RuntimeError as error:
        answers["too_little_memory"] = str(error)
    return answers


def load_shapes(of: VLLMSampler) -> dict[str, tuple[int, ...]]:
    """The parameters of vLLM's model in the shapes that its own loaders fill; of a shared one the first name."""

    def shapes(model: Any) -> dict[str, tuple[int, ...]]:
        found, seen = {}, set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            module, _, key = name.rpartition(".")
            before = get_layerwise_info(model.get_submodule(module)).restore_metadata[0]
            if id(parameter) not in seen:
                found[name] = tuple(before.get(key, parameter).shape)
            seen.add(id(parameter))
        return found

    [answer] = of.llm.apply_model(shapes)
    return answer


def tied(first: Path, second: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    before = random_states()
    made = sampler(first)
    try:
        ask(made, [20])
    except RuntimeError as error:
        answers["too_early"] = str(error)
    hand_over(made, first, 0)
    answers["first"] = ask(made, [5, 20, 140, 300])
    hand_over(made, second, 1)
    answers["second"] = ask(made, [5, 20, 140, 300], n=4)
    answers["states"] = before, random_states()
    answers["vllm_version"] = made.llm.get_weight_version()
    answers["shapes_tied"] = load_shapes(made)
    answers["greedy"] = ask(made, [5, 20, 140], n=1, temperature=0.0)
    answers["at_one"] = ask(made, [5, 20, 140], temperature=1.0)
    answers["seeds"] = seeds(made)
    answers |= stale_prefix(made, first, second)
    with mock.patch.object(weight_transfer, "repack_tied_head"):
        hand_over(made, first, 4)
        answers["without_repacking"] = ask(made, [5, 20, 140])
    with mock.patch.object(backend, "rng_preserved", contextlib.nullcontext):
        unseeded = random_states()
        sampler_of_one = sampler(first)
        answers["states_without_cure"] = unseeded, random_states()
        sampler_of_one.close()
    return answers


def seeds(of: VLLMSampler) -> dict[str, list[tuple[int, ...]]]:
    """The tokens of one prompt under different seeds."""
    text = prompt(20, 0)

    def tokens(*requests: Request) -> list[tuple[int, ...]]:
        return [rollout.tokens for group in of.generate(requests) for rollout in group]

    return {
        "three": tokens(Request(text, 3, 1.0, 8, seed=50)),
        "one_by_one": [tokens(Request(text, 1, 1.0, 8, seed=50 + i))[0] for i in range(3)],
        "equal": tokens(Request(text, 1, 1.0, 8, seed=50), Request(text, 1, 1.0, 8, seed=50)),
        "apart": tokens(Request(text, 1, 1.0, 8, seed=50), Request(text, 1, 1.0, 8, seed=2**40)),
    }


def stale_prefix(made: VLLMSampler, first: Path, second: Path) -> dict[str, Any]:
    """300 tokens are two full blocks of the cache, filled here by the weights before the update."""
    answers: dict[str, Any] = {}
    hand_over(made, first, 2)
    ask(made, [300, 300])
    again = made.llm.generate({"prompt_token_ids": list(prompt(300, 0))}, vllm.SamplingParams(max_tokens=1, seed=0))
    answers["cached_tokens"] = again[0].num_cached_tokens
    hand_over(made, second, 3)
    answers["after_reset"] = ask(made, [300, 300])
    hand_over(made, first, 2)
    ask(made, [300, 300])
    with mock.patch.object(made.llm, "reset_prefix_cache", return_value=True):
        hand_over(made, second, 3)
    answers["without_reset"] = ask(made, [300, 300])
    with mock.patch.object(made.llm, "reset_prefix_cache", return_value=False):
        try:
            hand_over(made, second, 3)
        except RuntimeError as error:
            answers["reset_refused"] = str(error)
    return answers


def experts(first: Path, second: Path) -> dict[str, Any]:
    made = sampler(first)
    hand_over(made, first, 0)
    hand_over(made, second, 1)
    answers = {"second": ask(made, [5, 20]), "shapes": load_shapes(made)}
    with mock.patch.object(weight_transfer, "forget_expert_kernels"):
        hand_over(made, first, 2)
        answers["without_forgetting"] = ask(made, [5, 20])
    made.close()
    return answers


def without_construction_cures(first: Path, second: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    with engine_arguments(logprobs_mode="raw_logprobs"):
        raw = sampler(first, kv_cache_mb=smallest_mb(first))
    hand_over(raw, second, 0)
    answers["raw"] = ask(raw, [5, 20])
    raw.close()

    lengths = [40 + 11 * i for i in range(24)]
    whole = sampler(first, max_model_len=320, max_batched_tokens=320)
    hand_over(whole, second, 0)
    answers["many_prompts"] = ask(whole, lengths)
    whole.close()
    with engine_arguments(enable_chunked_prefill=True):
        chunked = sampler(first, max_model_len=320, max_batched_tokens=320)
    hand_over(chunked, second, 0)
    try:
        ask(chunked, lengths)
        answers["chunked"] = "no error"
    except RuntimeError as error:
        answers["chunked"] = str(error)
    chunked.close()
    return answers


def tensor_parallel(
    first: Path, mine: Path, stops: Sequence[int], started: Path, other_started: Path
) -> dict[str, Any]:
    """One of two jobs at the same time on this host: an engine over both ranks, with the job's own weights."""
    _stops.extend(stops)
    made = sampler(first, tensor_parallel=2)
    started.touch()
    deadline = time.monotonic() + 200
    while not other_started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    overlapped = other_started.exists()
    dist.barrier()
    answers = {"overlapped": overlapped, "replica": (made.replica, made.replicas), "shapes": load_shapes(made)}
    hand_over(made, first, 0)
    ask(made, [20])
    hand_over(made, mine, 1)
    for _ in range(4):
        answers["rollouts"] = ask(made, [5, 20, 140])
    answers["job"] = os.environ["TORCHELASTIC_RUN_ID"]
    communicator: Any = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    answers["memory"] = _CPUSHMDistributed.make_group_name(communicator)
    answers["plain_method"] = _plain_distributed_args(None)[0]
    made.close()
    return answers
