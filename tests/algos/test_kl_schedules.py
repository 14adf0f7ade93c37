import math
import random
from pathlib import Path

import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from spark_megatron.algos.kl_schedules.adaptive import Adaptive
from spark_megatron.algos.kl_schedules.base import KLSchedule
from spark_megatron.algos.kl_schedules.constant import Constant
from spark_megatron.algos.kl_schedules.cosine import Cosine
from spark_megatron.algos.kl_schedules.linear import Linear
from spark_megatron.algos.kl_schedules.warmup import Warmup

ROOT = Path(__file__).parents[2]
CONFIGURED = sorted((ROOT / "conf" / "kl_schedule").glob("*.yaml"))
MODULES = ROOT / "spark_megatron" / "algos" / "kl_schedules"


def load(path: Path) -> KLSchedule:
    schedule: KLSchedule = instantiate(OmegaConf.load(path))
    return schedule


def adaptive(
    initial: float = 0.001,
    target: float = 0.05,
    gain: float = 0.1,
    clip: float = 0.2,
    minimum: float = 1e-6,
    maximum: float = 10.0,
) -> Adaptive:
    return Adaptive(initial=initial, target=target, gain=gain, clip=clip, minimum=minimum, maximum=maximum)


@pytest.mark.parametrize("path", CONFIGURED, ids=lambda p: p.stem)
def test_every_configured_schedule_gives_coefficients_and_resumes(path: Path) -> None:
    """An uninterrupted run, and one that is restored from its state before every step, agree at all 50 steps."""
    rng = random.Random(0)
    steady, resumed = load(path), load(path)
    for step in range(50):
        coef = steady.coef(step, 40)
        assert math.isfinite(coef)
        assert coef >= 0
        fresh = load(path)
        fresh.load_state_dict(resumed.state_dict())
        resumed = fresh
        assert resumed.coef(step, 40) == coef
        kl = rng.choice([0.0, rng.random(), 100 * rng.random(), -0.01])
        steady.observe(kl)
        resumed.observe(kl)


def test_every_module_is_configured() -> None:
    modules = {p.stem for p in MODULES.glob("*.py")} - {"__init__", "base"}
    assert modules == {p.stem for p in CONFIGURED}


def test_constant() -> None:
    schedule = Constant(value=0.04)
    schedule.observe(9.0)
    assert [schedule.coef(step, 10) for step in (0, 9, 99)] == [0.04] * 3


def test_linear() -> None:
    schedule = Linear(start=0.4, end=0.0)
    assert [schedule.coef(step, 5) for step in (0, 1, 2, 4, 50)] == pytest.approx([0.4, 0.3, 0.2, 0.0, 0.0])


def test_cosine() -> None:
    schedule = Cosine(start=1.0, end=0.0)
    # cos(pi/3) = 1/2 at a third of the way.
    assert [schedule.coef(step, 7) for step in (0, 2, 3, 6, 60)] == pytest.approx([1.0, 0.75, 0.5, 0.0, 0.0])


def test_cosine_keeps_its_ends_exactly() -> None:
    schedule = Cosine(start=0.3, end=0.1)
    assert (schedule.coef(0, 9), schedule.coef(8, 9)) == (0.3, 0.1)


@pytest.mark.parametrize("total", [5, 1000])
def test_warmup(total: int) -> None:
    schedule = Warmup(start=0.0, end=0.2, steps=4)
    assert [schedule.coef(step, total) for step in (0, 1, 2, 4, 90)] == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.2])


def test_adaptive_moves_by_the_clipped_error() -> None:
    schedule = adaptive(initial=1.0, target=0.5)
    factors = []
    for kl in (0.55, 5.0, 0.5, 0.45, 0.0):
        before = schedule.coef(0, 1)
        schedule.observe(kl)
        factors.append(schedule.coef(0, 1) / before)
    assert factors == pytest.approx([1.01, 1.02, 1.0, 0.99, 0.98])


def test_adaptive_gain_and_clip_set_the_pace() -> None:
    schedule = adaptive(initial=1.0, gain=0.5, clip=1.0)
    schedule.observe(0.1)
    assert schedule.coef(0, 1) == pytest.approx(1.5)


def test_adaptive_stays_within_its_bounds() -> None:
    schedule = adaptive(initial=1.0, minimum=0.99, maximum=1.01)
    schedule.observe(100.0)
    assert schedule.coef(0, 1) == 1.01
    for _ in range(3):
        schedule.observe(0.0)
    assert schedule.coef(0, 1) == 0.99


def test_adaptive_brings_a_simple_plant_to_its_target() -> None:
    # A policy whose KL is inversely proportional to the coefficient: 0.05 nats at 0.01.
    schedule = adaptive(initial=0.5, target=0.05)
    for step in range(600):
        schedule.observe(0.0005 / schedule.coef(step, 600))
    assert schedule.coef(600, 600) == pytest.approx(0.01, rel=1e-3)


@given(st.lists(st.floats(-1, 1e6), max_size=30))
def test_adaptive_coefficient_changes_by_two_percent_at_most(observations: list[float]) -> None:
    schedule = adaptive()
    for kl in observations:
        before = schedule.coef(0, 1)
        schedule.observe(kl)
        assert 0.98 * before <= schedule.coef(0, 1) * (1 + 1e-12)
        assert schedule.coef(0, 1) <= 1.02 * before * (1 + 1e-12)


def test_adaptive_applies_its_own_bounds_to_a_restored_state() -> None:
    schedule = adaptive(maximum=0.5)
    schedule.load_state_dict({"coef": 3.0})
    assert schedule.coef(0, 1) == 0.5


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_adaptive_refuses_a_diverged_kl(kl: float) -> None:
    with pytest.raises(ValueError, match="the measured KL is"):
        adaptive().observe(kl)


def test_state_of_another_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="resume with the kl_schedule"):
        Constant(value=0.1).load_state_dict(adaptive().state_dict())
    with pytest.raises(ValueError, match="resume with the kl_schedule"):
        adaptive().load_state_dict({})


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_coefficients_are_checked(bad: float) -> None:
    with pytest.raises(ValueError, match=r"kl_schedule\.value"):
        Constant(value=bad)
    with pytest.raises(ValueError, match=r"kl_schedule\.start"):
        Linear(start=bad, end=0.0)
    with pytest.raises(ValueError, match=r"kl_schedule\.end"):
        Cosine(start=0.0, end=bad)
    with pytest.raises(ValueError, match=r"kl_schedule\.end"):
        Warmup(start=0.0, end=bad, steps=3)
    with pytest.raises(ValueError, match=r"kl_schedule\.initial"):
        adaptive(initial=bad)


def test_warmup_needs_a_step() -> None:
    with pytest.raises(ValueError, match=r"kl_schedule\.steps=0"):
        Warmup(start=0.0, end=0.1, steps=0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("target", 0.0), ("target", math.nan), ("gain", 0.0), ("gain", 5.0), ("clip", -0.2), ("minimum", 0.0)],
)
def test_adaptive_settings_are_checked(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"kl_schedule\.{setting}={value}"):
        adaptive(**{setting: value})


@pytest.mark.parametrize("bounds", [{"minimum": 0.1}, {"maximum": 1e-5}])
def test_adaptive_must_start_within_its_bounds(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"kl_schedule\.initial=0\.001 must lie between"):
        adaptive(**bounds)
