"""The process and its job: environment, start and end, deadlines, seeds, versions, printing, small reductions."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import glob
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PACKAGES = ("torch", "megatron-core", "transformers", "hydra-core")

HUNG = 124
"""Exit code of a process that a deadline ended, as timeout(1) has it."""

_LAST_RESORT_S = 5.0
"""How much later a process ends that is too stuck to say what hung."""


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


class _Watch(threading.Thread):
    """Ends the process once ``alive`` was not called for ``seconds``."""

    def __init__(self, seconds: float, what: str) -> None:
        super().__init__(name=f"deadline of {what}", daemon=True)
        self._seconds = seconds
        self._message = f"rank {rank()}: no progress in {what} for {seconds:g} s (engine.timeout_s)"
        self._seen = time.monotonic()
        self._over = threading.Event()

    def alive(self) -> None:
        self._seen = time.monotonic()

    def end(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        left = self._seconds
        while left > 0:
            # Works also where the stuck thread keeps the interpreter to itself; this thread's message cannot come then.
            faulthandler.dump_traceback_later(left + _LAST_RESORT_S, exit=True, file=2)
            if self._over.wait(left):
                faulthandler.cancel_dump_traceback_later()
                return
            left = self._seen + self._seconds - time.monotonic()
        print(self._message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2, all_threads=True)
        _tell_launcher(TimeoutError(self._message))
        os._exit(HUNG)


_watches: list[_Watch] = []


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """End this process when the block stops making progress: ``seconds`` without a call of ``alive``.

    For waits that nothing else bounds, such as a peer in a collective of vLLM's own. What hung and the stacks of all
    threads go to standard error, the exit code is ``HUNG``, and the launcher is told. Deadlines may be nested.
    """
    watch = _Watch(seconds, what)
    watch.start()
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
        watch.end()


def alive() -> None:
    """Tell the open deadlines that work goes on. Cheap: call it as often as there is progress."""
    for watch in _watches:
        watch.alive()


def _tell_launcher(error: Exception) -> None:
    """What torchrun shows as the cause when this process fails."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


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


def local_world_size() -> int:
    """Ranks of the job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


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


_meetings = itertools.count(1)


def gather_after(work: str, item: T) -> list[T]:
    """``gather`` after work that can take the ranks unequally long. A collective.

    Raises:
        RuntimeError: some ranks did not come, because they died or within the job's timeout; it names them.
    """
    import torch.distributed as dist

    if world_size() == 1:
        return [item]
    store, meeting = dist.distributed_c10d._get_default_store(), next(_meetings)
    store.set(f"done/{rank()}", str(meeting))
    try:
        return gather(item)
    except RuntimeError as error:
        keys = [f"done/{other}" for other in range(world_size())]
        late = [other for other, key in enumerate(keys) if not (store.check([key]) and int(store.get(key)) >= meeting)]
        told = f"rank {rank()} was done with {work} and waited in vain for ranks {late}: {error}"
        raise RuntimeError(told) from error


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
