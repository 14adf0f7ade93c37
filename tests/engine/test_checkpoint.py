"""A run that is saved and loaded goes on as if nothing had been."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.engine.checkpoint import Checkpoints
from tests import distributed
from tests.engine.ranks_checkpoint import CASES, CROSSINGS, FREE
from tests.training_rows import learning_rate

Answers = list[dict[Any, Any]]
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "manifest.json", "state.json")


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is a disk of 24 MB of its own, where this user may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    may = os.geteuid() == 0
    may = (
        may and not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=False).returncode
    )
    yield folder
    if may:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_paths: dict[str, Path], small_disk: Path) -> Answers:
    """Two ranks; "saved" is the folder of what they saved."""
    folder = tmp_path_factory.mktemp("checkpoints")
    function = "tests.engine.ranks_checkpoint:on_two_ranks"
    paths = {"model_paths": model_paths, "target": folder / "saved", "small_disk": small_disk}
    return [rank | {"saved": folder / "saved"} for rank in distributed.run(2, function, folder / "job", **paths)]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, model_paths: dict[str, Path], pair: Answers) -> dict[str, Any]:
    """One rank that loads what two saved."""
    folder = tmp_path_factory.mktemp("single")
    function = "tests.engine.ranks_checkpoint:on_one_rank"
    [answers] = distributed.run(1, function, folder / "job", model_paths=model_paths, target=pair[0]["saved"])
    return dict(answers)


@pytest.mark.parametrize("case", [*CASES, "frozen", "offload"])
def test_two_updates_and_two_after_a_load_equal_four(pair: Answers, case: str) -> None:
    """Bit for bit: statistics of the updates (with the learning rates), weights, random numbers, the caller's state."""
    for rank in pair:
        answers = rank[case]
        assert answers["moved"], "the updates after the save must change the weights, or nothing is shown"
        assert answers["loaded"], "the weights at the save, although training went on while they were written"
        assert answers["stats"]
        assert answers["after"]
        assert answers["draws"]
        assert answers["state"]


@pytest.mark.parametrize("case", [*CASES, "frozen", "offload"])
def test_counters_and_schedule_go_on(pair: Answers, case: str) -> None:
    """The schedule is at the number of updates that were made, also where the engine had made others before."""
    for rank in pair:
        answers = rank[case]
        counted = answers["counted"]
        assert {**counted, "lr": None} == {"version": 2, "skipped": 1, "scheduled": 2, "lr": None}
        assert counted["lr"] == pytest.approx([learning_rate(2)] * len(counted["lr"]))
        assert answers["counters"]
        assert answers["finally"]
        assert answers["again"], "a second load is like the first"


@pytest.mark.parametrize("crossing", CROSSINGS, ids="-".join)
def test_any_layout_loads_what_another_saved(pair: Answers, crossing: tuple[str, str]) -> None:
    """The same weights; two more updates differ by the order of sums only. Random numbers belong to the ranks."""
    for rank in pair:
        answers = rank[crossing]
        assert answers["loaded"]
        assert answers["distance"] <= 1e-6
        assert answers["draws"], "the random state must be left as it is"
        assert answers["version"] == 4


@pytest.mark.parametrize("case", CASES)
def test_one_rank_loads_what_two_saved(single: dict[str, Any], case: str) -> None:
    answers = single[case]
    assert answers["loaded"]
    # The weights of the bf16 model are rounded to 8 bits; a master weight may fall to the other side.
    assert answers["distance"] <= (1e-3 if case.endswith("bf16") else 1e-6)
    assert answers["draws"]
    assert answers["version"] == 4


def test_an_engine_that_never_trained_can_be_saved(pair: Answers) -> None:
    assert all(rank["untrained"] for rank in pair)


def test_the_settings_of_the_optimizer_are_those_of_the_engine(pair: Answers) -> None:
    """Saved with a cosine from 1e-4 and a decay of 0.1, loaded by an engine with a constant 3e-4 and 0.3."""
    for rank in pair:
        groups, stats = rank["new settings"]["groups"], rank["new settings"]["stats"]
        assert groups == [{"lr": 3e-4, "weight_decay": decay, "step": 2} for decay in (0.3, 0.0)]
        assert stats[0]["lr"] == 3e-4


def test_a_checkpoint_is_complete_when_all_is_written(pair: Answers) -> None:
    for rank in pair:
        assert rank["timing"]["seen"] == {
            "while it is written": None,
            "written": "step_00000001",
            "while the next is written": "step_00000003",
            "at once": "step_00000004",
        }
        assert rank["timing"]["captured"], "what was saved is the engine as it was then"
        assert rank["timing"]["listed"] == ["latest", "step_00000003", "step_00000004"]


def test_the_folder_holds_nothing_else(pair: Answers) -> None:
    for rank in pair:
        assert rank["tp2"]["name"] == "step_00000002"
        assert rank["tp2"]["files"] == sorted([*FILES, "metadata.json"])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["flipped", "short", "missing"])
def test_a_damaged_file_is_named_on_every_rank(pair: Answers, kind: str, file: str) -> None:
    folder = pair[0]["saved"] / "damaged" / f"{kind}_{file}"
    for rank in pair:
        message = rank["damage"][kind, file]
        # A flipped bit of the manifest is in what it says of some file.
        assert message.startswith(str(folder if (kind, file) == ("flipped", "manifest.json") else folder / file))
        assert message.endswith(f"or delete {folder}")


def test_a_checkpoint_of_another_model_is_refused(pair: Answers, model_paths: dict[str, Path]) -> None:
    path = pair[0]["saved"] / "tp2" / "step_00000002"
    for rank in pair:
        assert rank["other model"].startswith(f"{path} does not fit {model_paths['qwen3']}: Global shape mismatch")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("free", FREE)
def test_a_full_disk_leaves_the_checkpoint_before(
    pair: Answers, small_disk: Path, free: int, asynchronous: bool
) -> None:
    """With keep=1, wherever the space ends; every rank hears of it, and nothing of the new one stays."""
    for rank in pair:
        answers = rank["full disk"]["failures"][free, asynchronous]
        told = f"the checkpoint of step 2 in {small_disk / 'saved'} failed on rank"
        assert answers["message"].startswith(told)
        assert answers["message"].endswith(("No space left on device", "File too large"))
        assert answers["listed"] == ["latest", "step_00000001"]
        assert answers["kept"]
        assert rank["full disk"]["next"] == "step_00000002", "with space again, the same object can save"


def test_a_writer_that_dies_is_told_of(pair: Answers) -> None:
    for rank in pair:
        assert "dead_writer failed on rank 0: its writing process died" in rank["dead writer"]["message"]
        assert rank["dead writer"]["listed"] == ["latest", "step_00000001"]
        assert rank["dead writer"]["next"] == "step_00000003"


def test_a_state_that_json_cannot_hold_is_refused(pair: Answers) -> None:
    for rank in pair:
        assert rank["no json"].endswith("no_json failed on rank 0: Object of type set is not JSON serializable")


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0: at least 1 checkpoint must stay"):
        Checkpoints(tmp_path, keep=0, asynchronous=True)


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", keep=1, asynchronous=True).latest() is None
