"""Recorded groups, written and read back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_megatron.tracking.jsonl import read_jsonl
from spark_megatron.tracking.recorder import Recorder
from spark_megatron.types import Group, Verdict

MakeGroup = Callable[..., Group]
RIGHT, UNPARSED = Verdict("ok", 1.0, "2"), Verdict("unparsed")


def test_a_row_holds_the_task_and_every_rollout(tmp_path: Path, make_group: MakeGroup) -> None:
    recorder = Recorder(path=tmp_path / "rollouts.jsonl", groups="all")
    recorder.record(3, [make_group([RIGHT, UNPARSED], task_id="gsm-1")])
    recorder.close()
    common = {"finish": "stop"}
    assert list(read_jsonl(tmp_path / "rollouts.jsonl")) == [
        {
            "step": 3,
            "kind": "solve",
            "id": "gsm-1",
            "source": "",
            "prompt": "1+1?",
            "answer": "2",
            "weight_version": 7,
            "rollouts": [
                {"text": "text 1", "reward": 1.0, "status": "ok", "parsed": "2", "length": 1, **common},
                {"text": "text 2", "reward": 0.0, "status": "unparsed", "parsed": None, "length": 2, **common},
            ],
        }
    ]


@pytest.mark.parametrize(("keep", "solve", "judge"), [("all", 5, 1), (2, 2, 1), (0, 0, 0)])
def test_the_limit_is_per_step_and_kind(
    tmp_path: Path, make_group: MakeGroup, keep: str | int, solve: int, judge: int
) -> None:
    recorder = Recorder(path=tmp_path / "rollouts.jsonl", groups=keep)  # type: ignore[arg-type]
    groups = [make_group([RIGHT], task_id=str(i)) for i in range(4)] + [make_group([RIGHT], kind="judge_one")]
    for step in (1, 2):
        recorder.record(step, groups)
        recorder.record(step, [make_group([RIGHT], task_id="4")])  # a second period of the same step
    recorder.close()
    rows = list(read_jsonl(tmp_path / "rollouts.jsonl"))
    for step in (1, 2):
        assert [r["id"] for r in rows if r["step"] == step and r["kind"] == "solve"] == [str(i) for i in range(solve)]
        assert sum(r["step"] == step and r["kind"] == "judge_one" for r in rows) == judge


@pytest.mark.parametrize("bad", [-1, "most", True])
def test_refuses_other_limits(tmp_path: Path, bad: object) -> None:
    with pytest.raises(ValueError, match=r"recorder\.groups="):
        Recorder(path=tmp_path / "rollouts.jsonl", groups=bad)  # type: ignore[arg-type]


def test_refuses_an_unchecked_group(tmp_path: Path, make_group: MakeGroup) -> None:
    with pytest.raises(ValueError, match="no verdict for each rollout"):
        Recorder(path=tmp_path / "r.jsonl", groups="all").record(1, [make_group([], tokens=[(1,)])])
