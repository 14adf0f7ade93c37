"""A run that is killed again and again ends with the same weights as one that is not."""

import random
import time
from pathlib import Path

import torch

from spark_megatron.engine import checkpoint_store as store
from tests import distributed
from tests.distributed import Job

KILLS = 20


def wait_for_events(job: Job, count: int) -> None:
    """Until rank 0 has told of so many; RuntimeError where a rank fails before."""
    deadline = time.monotonic() + 60
    while (job.folder / "0.log").read_text(errors="replace").count("now ") < count:
        job._raise_failure()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_at_random_moments(tmp_path: Path, model_paths: dict[str, Path]) -> None:
    """Of training and of saving; one rank, upon which a launcher ends the others, or all at once."""
    function, rng = "tests.engine.ranks_killed:train", random.Random(0)
    arguments = {"model": model_paths["qwen2"], "target": tmp_path / "saved"}
    for life in range(KILLS):
        job = distributed.start(2, function, tmp_path / f"life{life}", **arguments, updates=10**6, saving=True)
        wait_for_events(job, rng.randint(1, 9))
        time.sleep(rng.uniform(0, 0.05))
        for process in rng.choice([job.processes, job.processes[::-1]]):
            process.kill()
            time.sleep(rng.choice([0, 0.1]))
        for process in job.processes:
            process.wait()
    reached = store.latest(tmp_path / "saved")
    assert reached is not None
    updates = int(reached.name.removeprefix("step_")) + 2
    ended = distributed.run(2, function, tmp_path / "last", **arguments, updates=updates, saving=True)
    whole = distributed.run(
        2, function, tmp_path / "whole", **arguments | {"target": tmp_path / "none"}, updates=updates, saving=False
    )
    for (name, weight), other in zip(ended[0].items(), whole[0].values(), strict=True):
        assert torch.equal(weight, other), name
    assert len(store.complete(tmp_path / "saved")) == 2
    assert not list((tmp_path / "saved").glob("*.partial"))


def test_a_writing_process_ends_with_its_parent(tmp_path: Path, model_paths: dict[str, Path]) -> None:
    """Or the other ranks would not see that a rank is gone."""
    job = distributed.start(
        1, "tests.engine.ranks_killed:never_written", tmp_path / "job", model=model_paths["qwen2"], target=tmp_path
    )
    wait_for_events(job, 1)
    [rank] = job.processes
    [writer] = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + 30
    while Path("/proc", writer, "exe").exists():  # a zombie has none
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.latest(tmp_path) is None
