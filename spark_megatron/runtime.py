"""The process and its job: environment, start and end, seeds, versions, rank-zero printing, small reductions."""

from __future__ import annotations

import contextlib
import datetime
import glob
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PACKAGES = ("torch", "megatron-core", "transformers", "hydra-core")


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, without importing torch."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def prepare_environment() -> None:
    """Set what torch and vLLM read once, at import. Call it before either is imported; set variables are respected."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, beside the trainer
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # models are directories; nothing is ever fetched behind the user's back
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if not has_gpu():
        defaults |= {
            # vLLM compiles the ranking of log-probs at the first generate: 3 to 20 s for a run of minutes.
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def start(backend: str, timeout_s: float) -> None:
    """Join the job that torchrun describes in the environment. ``timeout_s`` bounds every collective."""
    import torch.distributed as dist

    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))


def stop() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch. Sampling does not depend on it: every request carries its own seed."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def rng_preserved() -> Iterator[None]:
    """Restore the random state of python, numpy and torch on exit.

    vLLM reseeds all three when an engine is built, and draws from torch's global generator for unseeded requests.
    """
    import numpy
    import torch

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def rank() -> int:
    """This process's global rank; 0 outside a distributed job."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def provenance() -> dict[str, Any]:
    """Git revision (None outside a checkout) and versions of what the numbers depend on."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    versions = {name: version(name) for name in PACKAGES}
    return {"git": git.stdout.strip() or None, "python": sys.version.split()[0], "packages": versions}


def say(message: str) -> None:
    """Print on rank zero."""
    if rank() == 0:
        print(message, file=sys.stderr, flush=True)


def gather(item: T) -> list[T]:
    """Every rank's item (picklable), in rank order, on every rank. A collective."""
    import torch.distributed as dist

    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def combine(dicts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add dictionaries key by key; keys that start with "max_" take the maximum."""
    total: dict[str, float] = {}
    for d in dicts:
        for key, value in d.items():
            if key not in total:
                total[key] = value
            else:
                total[key] = max(total[key], value) if key.startswith("max_") else total[key] + value
    return total


def broadcast_from_zero(item: T) -> T:
    """Rank zero's item on every rank. A collective."""
    import torch.distributed as dist

    if world_size() == 1:
        return item
    box: list[Any] = [item]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def decided_by_zero(decide: Callable[[], T], refusal: type[Exception]) -> T:
    """What ``decide`` gives on rank zero, the only one to call it; a ``refusal`` is raised on all. A collective."""
    decision: Any = None
    if rank() == 0:
        try:
            decision = decide()
        except refusal as error:
            decision = error
    decision = broadcast_from_zero(decision)
    if isinstance(decision, refusal):
        raise decision
    return decision
