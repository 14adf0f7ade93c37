import math
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from spark_megatron.algos.weight_schedules.base import OBJECTIVES, WeightSchedule
from spark_megatron.algos.weight_schedules.constant import Constant
from spark_megatron.algos.weight_schedules.linear import Linear

ROOT = Path(__file__).parents[2]
CONFIGURED = sorted((ROOT / "conf" / "weight_schedule").glob("*.yaml"))
MODULES = ROOT / "spark_megatron" / "algos" / "weight_schedules"
DEFAULTS = {"policy": 1.0, "pointwise": 0.4, "pairwise": 0.3, "reflection": 0.3}


def load(path: Path) -> WeightSchedule:
    schedule: WeightSchedule = instantiate(OmegaConf.load(path))
    return schedule


@pytest.mark.parametrize("path", CONFIGURED, ids=lambda p: p.stem)
def test_every_configured_schedule_weighs_every_objective(path: Path) -> None:
    schedule = load(path)
    for step in range(50):
        weights = schedule.weights(step, 40)
        assert tuple(weights) == OBJECTIVES
        assert all(math.isfinite(w) and w >= 0 for w in weights.values())
        assert any(weights.values())


def test_every_module_is_configured() -> None:
    modules = {p.stem for p in MODULES.glob("*.py")} - {"__init__", "base"}
    assert modules == {p.stem for p in CONFIGURED}


def test_configured_constant_has_the_default_weights() -> None:
    assert load(ROOT / "conf" / "weight_schedule" / "constant.yaml").weights(0, 1) == DEFAULTS


def test_constant_cannot_be_changed_through_what_it_gave_or_took() -> None:
    values = dict(DEFAULTS)
    schedule = Constant(values=values)
    schedule.weights(0, 10)["policy"] = 7.0
    values["policy"] = 9.0
    assert schedule.weights(9, 10) == DEFAULTS


def test_linear() -> None:
    schedule = Linear(start=DEFAULTS | {"pointwise": 0.0, "pairwise": 0.7}, end=DEFAULTS)
    assert schedule.weights(0, 5) == DEFAULTS | {"pointwise": 0.0, "pairwise": 0.7}
    assert schedule.weights(1, 5) == pytest.approx(DEFAULTS | {"pointwise": 0.1, "pairwise": 0.6})
    assert schedule.weights(4, 5) == schedule.weights(40, 5) == DEFAULTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairwse": 0.1}, r"values has the keys .*pairwse.*it needs"),
        ({"policy": -1.0}, r"values\.policy=-1\.0"),
        ({"policy": math.nan}, r"values\.policy=nan"),
        (dict.fromkeys(DEFAULTS, 0.0), "values is 0 for every objective"),
    ],
)
def test_weights_are_checked(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=r"weight_schedule\." + message):
        Constant(values=DEFAULTS | change)


def test_a_missing_objective_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_schedule\.end has the keys \['policy'\]"):
        Linear(start=DEFAULTS, end={"policy": 1.0})
