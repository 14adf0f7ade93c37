"""How fast, exact and frugal the hand-over of the weights is, on real engines of this machine.

    python tools/bench/handoff.py [--model DIR] [--dtype bf16|fp32] [--rounds N] [--repeats N]

Two jobs run one after the other: one rank (trainer and sampler in one layout), and two ranks (two pipeline stages to a
whole sampler each). Prints a table and, as the last line, one JSON object. Times are medians over the rounds, in which
a plain copy of the model's bytes and a hand-over take turns; ratios say the same on any day, absolute figures do not.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from spark_megatron import runtime

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a file, a program finds only what lies beside it
from tools.bench.engine import (
    MB,
    MODEL,
    check_model,
    optim_settings,
    peak_bytes,
    resident,
    seconds,
    show,
)

BUCKET = 16 << 20

DESCRIPTIONS = {
    "handoff_vs_memcpy": "a hand-over, in copies of the model's bytes",
    "own_vs_memcpy": "of it the trainer's own part",
    "repack_vs_memcpy": "of it vLLM's repacking",
    "memcpy_s": "one copy of the model's bytes, warm, s",
    "handoff_s": "one hand-over, s",
    "model_mb": "the model's bytes, MB",
    "pair_handoff_s": "a hand-over of two pipeline stages, s",
    "bytes_vs_bound": "bytes received there over needed and not held",
    "received_mb": "bytes received there, MB",
    "peak_extra_mb": "most memory that it takes on top there, MB",
    "peak_extra_vs_bucket": "the same over a bucket and the largest module's slice",
    "growth_kb": "growth of memory per hand-over over the repeats (least squares), KB",
    "repeats": "hand-overs in a row",
}


def job(ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures that rank 0 of a job of this program prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    own = ["--model", str(arguments.model), "--dtype", arguments.dtype]
    own += ["--rounds", str(arguments.rounds), "--repeats", str(arguments.repeats)]
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        environment = os.environ | {k: str(v) for k, v in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": port}
        output = None if rank else subprocess.PIPE
        processes.append(subprocess.Popen([sys.executable, __file__, *own], env=environment, stdout=output, text=True))
    said = processes[0].communicate()[0]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"the job of {ranks} ranks failed: exit codes {codes}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@contextmanager
def repacking(spent: list[float]) -> Iterator[None]:
    """Add the seconds that vLLM spends on processing weights to ``spent[0]``."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def timed(original: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            start = time.perf_counter()
            original(*arguments)
            spent[0] += time.perf_counter() - start

        return call

    name = "process_weights_after_loading"
    linear, embedding = (
        mock.patch.object(kind, name, timed(getattr(kind, name)))
        for kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    )
    with linear, embedding:
        yield


def rank_figures(arguments: argparse.Namespace) -> dict[str, float]:
    """What one rank of a job measures."""
    import torch

    from spark_megatron.engine.engine import Engine
    from spark_megatron.engine.model import DTYPES
    from spark_megatron.engine.parallel import Layout, Parallel
    from spark_megatron.hybrid.handoff import Hybrid
    from spark_megatron.hybrid.proof import Probe
    from spark_megatron.hybrid.traffic import bounds
    from spark_megatron.rollout.vllm import VLLMSampler

    torch.set_num_threads(1)
    parallel = Parallel(Layout(pipeline=runtime.world_size()))
    engine = Engine(
        arguments.model, parallel, DTYPES[arguments.dtype], optim_settings(), bucket_bytes=BUCKET, logits_bytes=64 << 20
    )
    sampler = VLLMSampler(
        model=str(arguments.model), tokenizer=None, dtype=arguments.dtype, stop_tokens=[0], tensor_parallel=1,
        max_model_len=256, max_sequences=16, max_batched_tokens=2048, kv_cache_mb=64, prefix_cache=False, sleep_level=0,
        weights="same",
    )  # fmt: skip
    hybrid = Hybrid(engine, sampler, Probe(((1, 2, 3),), 1, 0.5, 1 << 30, 0), (), 300.0)
    own = [parameter.detach().clone() for parameter in engine.placement.local.values()]
    copies = [torch.empty_like(parameter) for parameter in own]

    def memcpy() -> None:
        for into, parameter in zip(copies, own, strict=True):
            into.copy_(parameter)

    def hand_over() -> None:
        hybrid.last = {}
        hybrid._move_weights()

    memcpy()
    hand_over()
    times: dict[str, list[float]] = {"memcpy_s": [], "handoff_s": [], "own_s": [], "repack_s": []}
    for _ in range(arguments.rounds):
        times["memcpy_s"].append(seconds(memcpy))
        times["handoff_s"].append(seconds(hand_over))
        times["own_s"].append(hybrid.last["handoff_s"] - hybrid.last["install_s"])
        spent = [0.0]
        with repacking(spent):
            hand_over()
        times["repack_s"].append(spent[0])
    peak = max(peak_bytes(hand_over) for _ in range(3))
    memory = [resident("VmRSS")]
    for _ in range(arguments.repeats):
        hand_over()
        memory.append(resident("VmRSS"))
    growth = statistics.linear_regression(range(len(memory)), memory).slope
    sampler.close()
    transfer = hybrid.transfer
    return {name: statistics.median(values) for name, values in times.items()} | {
        "model_bytes": float(sum(parameter.nbytes for parameter in own)),
        "received": float(transfer.bytes),
        "bound": float(bounds(transfer.sides)[0][runtime.rank()]),
        "peak": float(peak),
        "allowed": float(BUCKET + transfer.workspace),
        "growth": growth,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures, from both jobs."""
    single, pair = (job(ranks, arguments) for ranks in (1, 2))
    one, busiest = single["ranks"][0], max(pair["ranks"], key=lambda rank: rank["peak"])
    copy = one["memcpy_s"]
    received, bound = (sum(rank[name] for rank in pair["ranks"]) for name in ("received", "bound"))
    return {
        "handoff_vs_memcpy": one["handoff_s"] / copy,
        "own_vs_memcpy": one["own_s"] / copy,
        "repack_vs_memcpy": one["repack_s"] / copy,
        "memcpy_s": copy,
        "handoff_s": one["handoff_s"],
        "model_mb": one["model_bytes"] / MB,
        "pair_handoff_s": max(rank["handoff_s"] for rank in pair["ranks"]),
        "bytes_vs_bound": received / bound,
        "received_mb": received / MB,
        "peak_extra_mb": busiest["peak"] / MB,
        "peak_extra_vs_bucket": busiest["peak"] / busiest["allowed"],
        "growth_kb": max(rank["growth"] for rank in (one, *pair["ranks"])) / 1024,
        "repeats": arguments.repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    check_model(parser, arguments.model)
    runtime.prepare_environment()
    if "RANK" in os.environ:
        runtime.start("gloo", 300.0)
        ranks = runtime.gather(rank_figures(arguments))
        if runtime.rank() == 0:
            print(json.dumps({"ranks": ranks}))
        runtime.stop()
        return
    show({"model": str(arguments.model), "dtype": arguments.dtype, **measure(arguments)}, DESCRIPTIONS)


if __name__ == "__main__":
    main()
