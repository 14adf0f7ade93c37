"""What the training loop adds to vLLM's own sampling time, and how long a start takes.

    python tools/bench/rollout.py [--model DIR] [--dtype fp32|bf16] [--tasks N] [--samples N] [--new N] [--rounds N]

Prints a table and, as the last line, one JSON object. Sampling through the loop (render, encode, deal, sample, decode,
check, collect) and bare ``LLM.generate`` on the same requests take turns in one process; the ratio is of their tokens
per second, the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from spark_megatron import runtime

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a file, a program finds only what lies beside it
from tools.bench.engine import check_model, optim_settings, show

MODEL = Path("examples/models/spark_tiny")

DESCRIPTIONS = {
    "rollout_vs_vllm": "tokens/s inside the loop over bare vLLM on the same requests",
    "rollout_tokens_s": "tokens/s inside the loop",
    "vllm_tokens_s": "tokens/s of bare vLLM",
    "tokens": "tokens of a round",
    "start_s": "from the start of the process to the first sampled token, s",
    "start_import_s": "of it importing torch, megatron-core, vLLM and transformers",
    "start_engine_s": "of it building and loading the trainer",
    "start_sampler_s": "of it building vLLM",
    "start_handoff_s": "of it the first hand-over with its proof",
    "start_sample_s": "of it the first sampled token",
}


def started() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures, on one rank."""
    import torch
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    from spark_megatron.data.chat import encode_prompt
    from spark_megatron.engine.engine import Engine
    from spark_megatron.engine.model import DTYPES
    from spark_megatron.engine.parallel import Layout, Parallel
    from spark_megatron.hybrid.handoff import Hybrid
    from spark_megatron.hybrid.proof import Probe
    from spark_megatron.rewards.math import MathVerifier
    from spark_megatron.rewards.scoring import score_groups
    from spark_megatron.rollout.groups import request_seed, sample_groups
    from spark_megatron.rollout.lengths import ResponseLengths
    from spark_megatron.rollout.vllm import VLLMSampler
    from spark_megatron.trainers.parts import stop_tokens
    from spark_megatron.types import Task

    torch.set_num_threads(1)
    marks = {"import": started()}
    directory = str(arguments.model)
    engine = Engine(
        directory,
        Parallel(Layout()),
        DTYPES[arguments.dtype],
        optim_settings(),
        bucket_bytes=64 << 20,
        logits_bytes=64 << 20,
    )
    marks["engine"] = started()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sampler = VLLMSampler(
        model=directory, tokenizer=tokenizer, dtype=arguments.dtype, stop_tokens=stop_tokens(directory, tokenizer),
        tensor_parallel=1, max_model_len=256, max_sequences=256, max_batched_tokens=8192, kv_cache_mb=256,
        prefix_cache=True, sleep_level=0, weights="same",
    )  # fmt: skip
    marks["sampler"] = started()
    tasks = [
        Task(str(i), "solve", f"Solve: {i % 10} + {i * 7 % 10} - {i // 7 % 10}", "3", "math", "")
        for i in range(arguments.tasks)
    ]
    prompts = [encode_prompt(tokenizer, task) for task in tasks]
    hybrid = Hybrid(engine, sampler, Probe((prompts[0],), 1, 0.5, 1, 0), (), 300.0)
    with hybrid.generating():
        marks["handoff"] = started()
    check = partial(score_groups, verifiers={"math": MathVerifier(symbolic=None)})
    settings: dict[str, Any] = {"n": arguments.samples, "temperature": 1.0, "timeout_s": 300.0}
    sample_groups(sampler, tokenizer, tasks[:1], check, ResponseLengths(), max_new_tokens=1, seed=(0,), **settings)
    marks["sample"] = started()

    def ours(number: int) -> int:
        phase = sample_groups(
            sampler,
            tokenizer,
            tasks,
            check,
            ResponseLengths(),
            max_new_tokens=arguments.new,
            seed=(number,),
            **settings,
        )
        return sum(len(rollout.tokens) for group in phase.groups for rollout in group.rollouts)

    def bare(number: int) -> int:
        params = [
            SamplingParams(
                n=arguments.samples,
                temperature=1.0,
                max_tokens=arguments.new,
                seed=request_seed(number, i),
                logprobs=0,
                detokenize=False,
                stop_token_ids=sampler.stop_tokens,
            )
            for i in range(len(prompts))
        ]
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = sampler.llm.generate(given, params, use_tqdm=False)
        return sum(len(output.token_ids) for request in outputs for output in request.outputs)

    ours(0), bare(0)
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(1, arguments.rounds + 1):
        for name, work in (("ours", ours), ("bare", bare)):
            sampler.llm.reset_prefix_cache()
            start = time.perf_counter()
            tokens = work(number)
            rates[name].append(tokens / (time.perf_counter() - start))
    sampler.close()
    steps = list(marks)
    spans = {f"start_{b}_s": marks[b] - marks[a] for a, b in pairwise(steps)}
    return {
        "rollout_vs_vllm": statistics.median(a / b for a, b in zip(rates["ours"], rates["bare"], strict=True)),
        "rollout_tokens_s": statistics.median(rates["ours"]),
        "vllm_tokens_s": statistics.median(rates["bare"]),
        "tokens": tokens,
        "start_s": marks["sample"],
        "start_import_s": marks["import"],
        **spans,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    check_model(parser, arguments.model)
    runtime.prepare_environment()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone | {"GLOO_SOCKET_IFNAME": "lo"})
    runtime.start("gloo", 300.0)
    figures = measure(arguments)
    runtime.stop()
    show({"model": str(arguments.model), "dtype": arguments.dtype, **figures}, DESCRIPTIONS)


if __name__ == "__main__":
    main()
