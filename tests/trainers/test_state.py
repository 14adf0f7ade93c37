"""What a run keeps beside its weights: through JSON and back, and what may not go on from it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_megatron.algos.kl_schedules.adaptive import Adaptive
from spark_megatron.algos.kl_schedules.base import KLSchedule
from spark_megatron.algos.kl_schedules.constant import Constant
from spark_megatron.config import Config
from spark_megatron.data.curriculum import Shuffled
from spark_megatron.data.rows import Files
from spark_megatron.data.stream import TaskStream
from spark_megatron.data.table import TableSource
from spark_megatron.recycle.pool import Pool
from spark_megatron.rollout.lengths import ResponseLengths
from spark_megatron.schema import ConfigError
from spark_megatron.tracking.hacking import HackingMonitor
from spark_megatron.trainers.state import RunState, changes, check_fit
from spark_megatron.types import Group, Rollout, Task
from tests.settings import save_shape, typed

ADAPTIVE = [f"kl_schedule={{_target_: {Adaptive.__module__}.Adaptive}}"]
CONSTANT = [f"kl_schedule={{_target_: {Constant.__module__}.Constant}}"]
MODEL: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "vocab_size": 100}
MakeParts = Callable[..., Any]


def settings(directory: Path, *overrides: str) -> Config:
    model = save_shape(directory / "model", **MODEL)
    return typed(directory, f"model.path={model}", *overrides)


@pytest.fixture
def make_parts(tmp_path: Path) -> MakeParts:
    """The parts of a run that have a state, on a file of some questions."""

    def make(questions: int = 10, kl_schedule: KLSchedule | None = None, seed: int = 0) -> Any:
        path = tmp_path / f"{questions}.jsonl"
        path.write_text("".join(json.dumps({"q": f"{i}+1?", "a": str(i + 1)}) + "\n" for i in range(questions)))
        source = TableSource(
            rows=Files(paths=str(path)), question_field="q", answer_field="a", answer_after=None,
            instruction="{question}", system=None, verifier="math", max_broken=0,
        )  # fmt: skip
        return SimpleNamespace(
            stream=TaskStream(source=source, seed=seed, heldout_share=0.0, order=Shuffled()),
            pool=Pool(max_size=None),
            kl_schedule=kl_schedule or Constant(value=0.1),
            lengths=ResponseLengths(),
            reward_model=None,
            rng=random.Random(1),
        )

    return make


def adaptive() -> Adaptive:
    return Adaptive(initial=0.1, target=0.05, gain=0.1, clip=0.2, minimum=0.001, maximum=1.0)


def judge(name: str) -> Task:
    return Task(name, "judge_pair", "A or B?", "A", "choice", "1+1?", source="t", shown=("2", "3"))


def used(parts: Any) -> None:
    """Some steps of a run, crossing into the second pass of the tasks."""
    parts.stream.take(14)
    parts.pool.add([judge("first"), judge("second")])
    parts.rng.gauss(0, 1)
    rollout = Rollout((5, 6), (-0.1, -0.2), "", "stop", 0)
    parts.lengths.observe([Group(judge("first"), (1,), (rollout,))])
    for kl in (0.2, 0.3):
        parts.kl_schedule.observe(kl)


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, make_parts: MakeParts) -> None:
    cfg, parts = settings(tmp_path, *ADAPTIVE), make_parts(kl_schedule=adaptive())
    used(parts)
    state = RunState(cfg, parts, origin="/a", step=7, before={"solve": {"acc": 0.5}}, best=0.25)
    saved = json.loads(json.dumps(state.state_dict()))

    fresh = make_parts(kl_schedule=adaptive())
    resumed = RunState(cfg, fresh)
    resumed.load_state_dict(saved)
    assert (resumed.origin, resumed.step, resumed.before, resumed.best) == ("/a", 7, {"solve": {"acc": 0.5}}, 0.25)
    assert resumed.state_dict() == state.state_dict()
    assert [task.id for task in fresh.stream.take(30)] == [task.id for task in parts.stream.take(30)]
    assert fresh.pool.take(2) == [judge("first"), judge("second")]
    assert fresh.lengths.expected("judge_pair", 9) == 2
    assert fresh.kl_schedule.coef(0, 1) == parts.kl_schedule.coef(0, 1) > 0.1
    assert [fresh.rng.gauss(0, 1) for _ in range(5)] == [parts.rng.gauss(0, 1) for _ in range(5)]


def test_other_tasks_start_at_their_beginning_with_a_warning(
    tmp_path: Path, make_parts: MakeParts, caplog: pytest.LogCaptureFixture
) -> None:
    cfg, parts = settings(tmp_path), make_parts()
    used(parts)
    other = make_parts(questions=11)
    RunState(cfg, other).load_state_dict(RunState(cfg, parts, step=7).state_dict())
    assert "the stream starts anew" in caplog.text
    assert other.stream.take(11) == make_parts(questions=11).stream.take(11)
    assert len(other.pool) == 2


def test_a_checkpoint_without_response_lengths_can_be_gone_on_with(tmp_path: Path, make_parts: MakeParts) -> None:
    cfg, parts = settings(tmp_path), make_parts()
    used(parts)
    saved = RunState(cfg, parts, step=7).state_dict()
    del saved["lengths"]
    fresh = make_parts()
    RunState(cfg, fresh).load_state_dict(saved)
    assert fresh.lengths.expected("judge_pair", 9) == 9


def test_another_kind_of_kl_schedule_begins_with_its_own_state(tmp_path: Path, make_parts: MakeParts) -> None:
    parts = make_parts(kl_schedule=adaptive())
    used(parts)
    saved = RunState(settings(tmp_path, *ADAPTIVE), parts).state_dict()
    fresh = make_parts()
    RunState(settings(tmp_path, *CONSTANT), fresh).load_state_dict(saved)
    assert fresh.kl_schedule.coef(7, 9) == 0.1


@pytest.fixture
def saved(tmp_path: Path, make_parts: MakeParts) -> dict[str, Any]:
    return RunState(settings(tmp_path), make_parts(), step=7).state_dict()


def refusal(saved: dict[str, Any], cfg: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_fit(saved, cfg, Path("/run/step"))
    return str(caught.value)


FIX = "set it back, or take another run_dir and start from a model (model.path=...)"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.dtype=bf16", "model.dtype=bf16, but /run/step was saved with fp32"),
        ("trainer.loop={_target_: spark_megatron.trainers.sft.train}",
         "trainer.loop._target_=spark_megatron.trainers.sft.train, but /run/step was saved with "
         "spark_megatron.trainers.spark.train"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(tmp_path: Path, saved: dict[str, Any], override: str, told: str) -> None:
    assert refusal(saved, settings(tmp_path, override)) == f"{told}: {FIX}"


@pytest.mark.parametrize(
    ("key", "value", "size"),
    [("num_hidden_layers", 8, "layers=8"), ("head_dim", 32, "head_dim=32"), ("model_type", "qwen3", "family=qwen3")],
)
def test_another_architecture_is_refused(
    tmp_path: Path, saved: dict[str, Any], key: str, value: object, size: str
) -> None:
    folder = save_shape(tmp_path / "other", **{**MODEL, key: value})
    name, _, new = size.partition("=")
    told = f"{name} (of model.path={folder})={new}, but /run/step was saved with {saved['model'][name]}: {FIX}"
    assert refusal(saved, settings(tmp_path, f"model.path={folder}")) == told


def test_another_format_is_refused(tmp_path: Path, saved: dict[str, Any]) -> None:
    assert refusal({**saved, "format": 99}, settings(tmp_path)).startswith(
        "/run/step has the format 99, this program reads 1: go on with the version that saved it ("
    )


def test_a_converted_model_is_no_run(tmp_path: Path) -> None:
    told = "/run/step holds a model but no run to go on with: convert it and start from that, model.path=..."
    assert refusal({}, settings(tmp_path)) == told


def test_everything_else_may_change_and_is_listed(tmp_path: Path, saved: dict[str, Any]) -> None:
    again = json.loads(json.dumps(saved))
    assert changes(again, settings(tmp_path, f"run_dir={tmp_path}/other", "checkpoint.resume=never")) == []
    again["provenance"] = {"git": "abc", "python": "3.9", "packages": {"torch": "1.0"}}
    now = settings(
        tmp_path, "seed=3", "optim.betas=[0.8,0.95]", "parallel.tensor=1", "objective.pool_size=100",
        "kl_schedule={_target_: x.Linear, start: 0.1}", "~kl_schedule.value",
    )  # fmt: skip
    check_fit(again, now, tmp_path)
    found = changes(again, now)
    assert [line for line in found if not line.startswith(("git", "python", "packages"))] == [
        "seed: 0 -> 3",
        "parallel.tensor: 2 -> 1",
        "objective.pool_size: null -> 100",
        "optim.betas: [0.9, 0.95] -> [0.8, 0.95]",
        "kl_schedule._target_: spark_megatron.algos.kl_schedules.constant.Constant -> x.Linear",
        "kl_schedule.value: 0.001 -> (not set)",
        "kl_schedule.start: (not set) -> 0.1",
    ]
    assert {line.partition(" -> ")[0] for line in found} >= {"git: abc", "python: 3.9", "packages.torch: 1.0"}


def test_what_is_watched_for_hacking_goes_on(tmp_path: Path, make_parts: MakeParts) -> None:
    cfg, parts, other = settings(tmp_path), make_parts(), make_parts()
    for each in (parts, other):
        each.reward_model = SimpleNamespace(monitor=HackingMonitor(rise=0.1, drop=0.1))
    monitor = parts.reward_model.monitor
    monitor.observe(0.5)
    monitor.evaluated(0.75)
    monitor.observe(0.75)
    state = json.loads(json.dumps(RunState(cfg, parts).state_dict()))
    RunState(cfg, other).load_state_dict(state)
    assert other.reward_model.monitor.evaluated(0.5) == monitor.evaluated(0.5)
    assert RunState(cfg, make_parts()).state_dict()["monitor"] is None


def test_a_checkpoint_that_does_not_know_a_size_of_the_model_is_gone_on_with(
    tmp_path: Path, make_parts: MakeParts
) -> None:
    """One from before models could have a scalar head."""
    cfg = settings(tmp_path)
    state = RunState(cfg, make_parts()).state_dict()
    del state["model"]["scalar"]
    check_fit(state, cfg, Path("/run/step"))
