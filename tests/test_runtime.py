import faulthandler
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
import torch

from spark_megatron import runtime


def test_combine_adds_and_takes_the_largest_of_maxima() -> None:
    parts = [{"tokens": 3.0, "max_error": 0.5, "kl": -1.0}, {"tokens": 4.0, "max_error": 0.25, "loss": 2.0}]
    assert runtime.combine(parts) == {"tokens": 7.0, "max_error": 0.5, "kl": -1.0, "loss": 2.0}
    assert runtime.combine(reversed(parts)) == runtime.combine(parts)
    assert runtime.combine([]) == {}


def test_combine_of_negative_maxima() -> None:
    assert runtime.combine([{"max_gap": -3.0}, {"max_gap": -2.0}]) == {"max_gap": -2.0}


def test_combine_leaves_its_arguments_alone() -> None:
    first = {"tokens": 1.0}
    runtime.combine([first, {"tokens": 2.0}])
    assert first == {"tokens": 1.0}


def test_outside_of_a_job_there_is_one_rank() -> None:
    assert (runtime.rank(), runtime.world_size()) == (0, 1)
    assert runtime.gather("item") == ["item"]
    assert runtime.broadcast_from_zero("item") == "item"


def test_rank_zero_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.say("hello")
    assert capsys.readouterr().err == "hello\n"
    monkeypatch.setattr(runtime, "rank", lambda: 1)
    runtime.say("hello")
    assert capsys.readouterr().err == ""


def test_seeding_repeats_the_draws_of_all_generators() -> None:
    def draws() -> tuple[float, float, float]:
        runtime.seed_all(3)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with runtime.rng_preserved():
        assert draws() == draws()


def test_random_states_are_restored_also_after_an_error() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def drawn_after_a_failure() -> tuple[float, float, float]:
        with pytest.raises(KeyError), runtime.rng_preserved():
            runtime.seed_all(7)
            raise KeyError
        return draws()

    with runtime.rng_preserved():
        runtime.seed_all(1)
        expected = draws()
        runtime.seed_all(1)
        assert drawn_after_a_failure() == expected


def test_variables_that_are_set_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS")
    runtime.prepare_environment()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue[int]]:
    """The exit codes with which this process would have ended."""
    codes: Queue[int] = Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    monkeypatch.setattr(runtime, "_LAST_RESORT_S", 1000.0)
    yield codes
    faulthandler.cancel_dump_traceback_later()


def test_a_deadline_ends_what_makes_no_progress(ended: Queue[int], capfd: pytest.CaptureFixture[str]) -> None:
    """It tells what hung, and where all threads are."""
    with runtime.deadline(0.05, "waiting"):
        assert ended.get(timeout=60) == runtime.HUNG
    said = capfd.readouterr().err
    assert said.startswith("rank 0: no progress in waiting for 0.05 s (engine.timeout_s)\n")
    assert "test_a_deadline_ends_what_makes_no_progress" in said


def test_a_deadline_leaves_alone_what_makes_progress(ended: Queue[int]) -> None:
    """However long it takes in all; an inner one that ends in time does not end the outer one."""
    with runtime.deadline(1.0, "working"):
        for _ in range(30):
            with runtime.deadline(30.0, "a part"):
                time.sleep(0.05)
            runtime.alive()
    runtime.alive()
    assert ended.empty()
    with runtime.deadline(0.05, "waiting"):
        with runtime.deadline(30.0, "a part"):
            pass
        assert ended.get(timeout=60) == runtime.HUNG


def test_an_error_is_not_held_up_by_a_deadline(ended: Queue[int]) -> None:
    with pytest.raises(KeyError), runtime.deadline(30.0, "working"):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deadline")]


def test_the_launcher_is_told_what_hung(ended: Queue[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with runtime.deadline(0.05, "waiting"):
        ended.get(timeout=60)
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told == "TimeoutError: rank 0: no progress in waiting for 0.05 s (engine.timeout_s)"


def test_gathering_after_work_alone_needs_nobody() -> None:
    assert runtime.gather_after("work", 5) == [5]


def test_provenance_names_revision_and_versions() -> None:
    found = runtime.provenance()
    assert set(found) == {"git", "python", "packages"}
    assert set(found["packages"]) >= {"torch", "megatron-core", "transformers", "hydra-core"}


def test_rank_zero_decides_and_its_refusal_is_everybodys() -> None:
    assert runtime.decided_by_zero(lambda: 5, ValueError) == 5

    def refuse() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="^no$"):
        runtime.decided_by_zero(refuse, ValueError)
