"""Speed and memory of the training engine beside transformers, in one process on one machine.

    python tools/bench/engine.py [--model DIR] [--dtype bf16|fp32] [--hf-dtype bf16|fp32] [--tokens N] [--steps N]
                                 [--threads N] [--seed N]

Prints a table and, as the last line, one JSON object. Both sides train the same tokens with the same number of threads
and take turns, so that whatever else the machine does hurts both. Figures are medians over the rounds, ratios are of
the two times in one round: they say the same on any day, absolute figures do not. A job normally has one thread per
rank; here one rank has all cores unless ``--threads`` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from spark_megatron import runtime

MODEL = Path("models/smollm2_135m")
LONGEST = 256
"""Tokens of the longest sequence of the ragged batch; the shortest may have an eighth of that."""
TRAINED = 0.5
"""Share of a sequence that is its response."""
MEMORY_TOKENS = 512, 1536
"""Numbers of tokens at which the memory of log-probs is measured."""
MB = 1 << 20

DESCRIPTIONS = {
    "train_vs_hf": "tokens/s over transformers on the same tokens, padded",
    "train_vs_hf_full": "tokens/s over transformers on full rows",
    "train_tokens_s": "tokens/s of ours",
    "hf_tokens_s": "tokens/s of transformers, padded",
    "hf_full_tokens_s": "tokens/s of transformers, full rows",
    "fill": "share of the padded batch that is tokens",
    "mfu": "model FLOPs over the matmul peak, ours",
    "mfu_hf": "model FLOPs over the matmul peak, transformers, padded",
    "mfu_vs_hf": "the first over the second",
    "peak_tflops": "matmul peak, the faster of bf16 and fp32 for bf16",
    "peak_bf16_tflops": "matmul peak of bf16",
    "peak_fp32_tflops": "matmul peak of fp32",
    "logprob_mem_slope": "extra bytes of log-probs per token and vocabulary entry",
    "plain_mem_slope": "the same of torch's log_softmax",
    "load_s": "loading the engine, s",
    "load_peak_mb": "memory that loading takes at most, MB",
    "engine_mb": "memory of a loaded engine after its first step, MB",
    "step_peak_mb": "what a step takes on top at most, MB",
    "ckpt_stall_s": "how long an asynchronous save stops training, s",
    "ckpt_sync_s": "how long a synchronous save does, s",
}


def model_flops(hf: Any, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward of a dense model over sequences of the given lengths.

    A weight of a matrix costs 2 FLOPs per token forwards and 4 backwards. Causal attention of a sequence of n tokens is
    two products of [n, head_dim] and half an [n, n] for each query head: 2 * n^2 * head_dim forwards, twice that
    backwards. The vocabulary is the real one, without padding; the input embedding is a look-up and costs nothing.
    Neither do padding and recomputation, whoever has them.
    """
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    attention = hf.hidden_size * head_dim * (2 * hf.num_attention_heads + 2 * hf.num_key_value_heads)
    mlp = 3 * hf.hidden_size * hf.intermediate_size
    weights = hf.num_hidden_layers * (attention + mlp) + hf.vocab_size * hf.hidden_size
    scores = hf.num_hidden_layers * hf.num_attention_heads * head_dim * sum(n * n for n in lengths)
    return 6.0 * weights * sum(lengths) + 6.0 * scores


def ragged_lengths(tokens: int, longest: int, rng: random.Random) -> list[int]:
    """Lengths that add up to ``tokens``, evenly spread between an eighth of the longest and the longest."""
    lengths = [longest]
    while (left := tokens - sum(lengths)) > longest:
        lengths.append(min(rng.randint(longest // 8, longest), left - longest // 8))
    return [*lengths, left]


def rows(lengths: Sequence[int], vocab: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the process's resident memory rises at most above where it stood while ``work`` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at what is resident now
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes, of a field of /proc/self/status: VmRSS is now, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def optim_settings() -> Any:
    """AdamW at a constant rate, as every benchmark takes it."""
    from spark_megatron.engine.optim import OptimSettings

    return OptimSettings(
        lr=1e-5,
        min_lr=0.0,
        decay="constant",
        decay_updates=1000,
        wsd_updates=0,
        warmup_updates=0,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        clip_grad=1.0,
        frozen=(),
        offload=False,
    )


class Ours:
    """The engine, trained as the trainer ``sft`` does: packed sequences, cross-entropy on the responses."""

    def __init__(self, model: Path, dtype: str) -> None:
        from spark_megatron.engine.engine import Engine
        from spark_megatron.engine.model import DTYPES
        from spark_megatron.engine.parallel import Layout, Parallel

        settings, parallel = optim_settings(), Parallel(Layout())
        sizes = {"bucket_bytes": 64 * MB, "logits_bytes": 256 * MB}
        self.engine = Engine(model, parallel, DTYPES[dtype], settings, **sizes)

    def step(self, batch: Any) -> None:
        from spark_megatron.algos.kl import k3
        from spark_megatron.algos.policy_loss import PPOClip
        from spark_megatron.algos.unified import token_loss

        policy = PPOClip(clip_low=0.2, clip_high=0.2)
        loss = partial(token_loss, policy_loss=policy, kl_coef=0.0, kl_estimator=k3)
        stats = self.engine.update([batch], loss, 1.0)
        assert not stats["skipped"]


def packed(sequences: Sequence[Sequence[int]]) -> Any:
    """The sequences as one micro-batch of supervised rows."""
    from spark_megatron.data.packing import pack
    from spark_megatron.types import Sample

    samples = []
    for tokens in sequences:
        cut = max(1, int(len(tokens) * (1 - TRAINED)))
        samples.append(Sample(tuple(tokens[:cut]), tuple(tokens[cut:]), "sft", "cross_entropy"))
    return pack(samples, {"sft": 1.0 / sum(len(s.response) for s in samples)}, 0)


class Theirs:
    """transformers' model and loss with torch's fused AdamW; batches are padded on the right to their longest row."""

    def __init__(self, model: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from spark_megatron.engine.model import DTYPES

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)

    def step(self, batch: dict[str, Any]) -> None:
        import torch

        self.optimizer.zero_grad()
        self.model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def padded(sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The sequences as transformers' collators make them of the same rows."""
    import torch

    shape = len(sequences), max(map(len, sequences))
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, tokens in enumerate(sequences):
        cut = max(1, int(len(tokens) * (1 - TRAINED)))
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, cut : len(tokens)] = torch.tensor(tokens[cut:])
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def matmul_peaks(dtype: str) -> dict[str, float]:
    """FLOP/s of large matrix products, the best of three each; "peak" is the one that a model in ``dtype`` could have:
    operands in bf16 may well be multiplied in fp32 where that is faster."""
    import torch

    size, peaks = 1024, {}
    for name, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = torch.randn(2, size, size).to(kind)
        peaks[name] = 2 * size**3 / min(seconds(partial(torch.mm, a, b)) for _ in range(3))
    return {"peak": max(peaks.values()) if dtype == "bf16" else peaks["fp32"]} | peaks


def training(ours: Ours, theirs: Theirs, hf: Any, args: argparse.Namespace) -> dict[str, float]:
    """Rounds of one step each of ours, theirs padded and theirs on full rows."""
    rng, longest = random.Random(args.seed), min(LONGEST, args.tokens // 4)
    ragged, full = ragged_lengths(args.tokens, longest, rng), [longest] * (args.tokens // longest)
    sequences = rows(ragged, hf.vocab_size, rng)
    works = {
        "ours": partial(ours.step, packed(sequences)),
        "hf": partial(theirs.step, padded(sequences)),
        "hf_full": partial(theirs.step, padded(rows(full, hf.vocab_size, rng))),
    }
    rounds = []
    for _ in range(1 + args.steps):
        rounds.append({name: seconds(work) for name, work in works.items()} | matmul_peaks(args.dtype))
    del rounds[0]  # what is done once

    def median(figure: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(figure, rounds))

    flops, tokens = model_flops(hf, ragged), sum(ragged)
    return {
        "fill": tokens / (len(ragged) * max(ragged)),
        "train_tokens_s": median(lambda r: tokens / r["ours"]),
        "hf_tokens_s": median(lambda r: tokens / r["hf"]),
        "hf_full_tokens_s": median(lambda r: sum(full) / r["hf_full"]),
        "train_vs_hf": median(lambda r: r["hf"] / r["ours"]),
        "train_vs_hf_full": median(lambda r: tokens / sum(full) * r["hf_full"] / r["ours"]),
        "mfu": median(lambda r: flops / r["ours"] / r["peak"]),
        "mfu_hf": median(lambda r: flops / r["hf"] / r["peak"]),
        "mfu_vs_hf": median(lambda r: r["hf"] / r["ours"]),
        "peak_tflops": median(lambda r: r["peak"] / 1e12),
        "peak_bf16_tflops": median(lambda r: r["bf16"] / 1e12),
        "peak_fp32_tflops": median(lambda r: r["fp32"] / 1e12),
    }


def logprob_memory(hf: Any, dtype: str) -> dict[str, float]:
    """Extra bytes per token and vocabulary entry of log-probs and their gradient, ours and plain."""
    import torch
    import torch.distributed as dist

    from spark_megatron.engine.logprobs import linear_logprobs
    from spark_megatron.engine.model import DTYPES

    head = torch.randn(hf.vocab_size, hf.hidden_size).to(DTYPES[dtype]).requires_grad_()
    assert dist.group.WORLD is not None
    piece = 4 * hf.vocab_size * MEMORY_TOKENS[0] // 2
    ours = partial(
        linear_logprobs,
        group=dist.group.WORLD,
        vocab_size=hf.vocab_size,
        temperature=1.0,
        logits_bytes=piece,
    )

    def plain(hidden: Any, weight: Any, labels: Any) -> Any:
        logprobs = (hidden @ weight.T).float().log_softmax(-1)
        return [logprobs.gather(-1, labels[:, None])]

    def peak(function: Callable[..., Any], tokens: int) -> int:
        hidden = torch.randn(tokens, hf.hidden_size).to(head.dtype).requires_grad_()
        labels = torch.randint(hf.vocab_size, (tokens,))
        return peak_bytes(lambda: function(hidden, head, labels)[0].sum().backward())

    few, many = MEMORY_TOKENS
    slopes = {}
    for name, function in {"logprob_mem_slope": ours, "plain_mem_slope": plain}.items():
        peak(function, few)
        slopes[name] = (peak(function, many) - peak(function, few)) / ((many - few) * hf.vocab_size)
    return slopes


def loading(args: argparse.Namespace, hf: Any) -> tuple[Ours, dict[str, float]]:
    """The engine, and what it takes to load it and to run a step."""
    loaded: list[Ours] = []
    before = resident("VmRSS")
    start = time.perf_counter()
    peak = peak_bytes(lambda: loaded.append(Ours(args.model, args.dtype)))
    load_s = time.perf_counter() - start
    rng = random.Random(args.seed)
    batch = packed(rows(ragged_lengths(args.tokens, min(LONGEST, args.tokens // 4), rng), hf.vocab_size, rng))
    loaded[0].step(batch)
    held = resident("VmRSS") - before
    step_peak = peak_bytes(lambda: loaded[0].step(batch))
    sizes = {"load_peak_mb": peak, "engine_mb": held, "step_peak_mb": step_peak}
    return loaded[0], {"load_s": load_s} | {name: size / MB for name, size in sizes.items()}


def checkpoints(ours: Ours) -> dict[str, float]:
    """How long a save holds up training, asynchronous and not."""
    from spark_megatron.engine.checkpoint import Checkpoints

    times = {}
    for name, asynchronous in (("ckpt_sync_s", False), ("ckpt_stall_s", True)):
        with tempfile.TemporaryDirectory() as folder:
            saves = Checkpoints(Path(folder), keep=1, asynchronous=asynchronous)
            times[name] = seconds(partial(saves.save, ours.engine, 1, {}))
            saves.wait()
    return times


@contextmanager
def job(threads: int) -> Iterator[None]:
    """A job of this process alone, with that many threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    runtime.prepare_environment()
    import torch

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            runtime.stop()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, by the names of ``DESCRIPTIONS``, and what they were measured on."""
    from spark_megatron.engine.model import read_config

    hf = read_config(args.model)
    ours, figures = loading(args, hf)
    figures |= logprob_memory(hf, args.dtype)
    figures |= checkpoints(ours)
    figures |= training(ours, Theirs(args.model, args.hf_dtype), hf, args)
    settings = {name: getattr(args, name) for name in ("dtype", "hf_dtype", "tokens", "steps", "threads")}
    return {"model": str(args.model), **settings, **{name: figures[name] for name in DESCRIPTIONS}}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="HF model directory")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the engine")
    parser.add_argument("--hf-dtype", choices=("bf16", "fp32"), help="of transformers; that of the engine by default")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="rounds after the first, which is not counted")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of either side")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.hf_dtype = args.hf_dtype or args.dtype
    check_model(parser, args.model)
    if args.tokens < 32 or args.steps < 1 or args.threads < 1:
        parser.error("--tokens must be at least 32, --steps and --threads at least 1")
    return args


def check_model(parser: argparse.ArgumentParser, model: Path) -> None:
    """End the program where there is no such model."""
    if not (model / "config.json").is_file():
        made = ": make it with python tools/import_smollm2.py" if model == MODEL else ""
        parser.error(f"--model {model} has no config.json{made}")


def show(figures: Mapping[str, Any], descriptions: Mapping[str, str]) -> None:
    """The table of the figures, and all of ``figures`` as one line of JSON."""
    width = max(map(len, descriptions))
    for name, text in descriptions.items():
        print(f"{name:{width}} {figures[name]:12.4g}  {text}")
    print(json.dumps(figures))


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    with job(args.threads):
        found = measure(args)
    show(found, DESCRIPTIONS)


if __name__ == "__main__":
    main()
