import pytest

from spark_megatron.algos.schedule import between, progress


@pytest.mark.parametrize(
    ("step", "total", "share"),
    [(0, 11, 0.0), (5, 11, 0.5), (10, 11, 1.0), (25, 11, 1.0), (0, 1, 0.0), (3, 1, 0.0), (1, 2, 1.0)],
)
def test_progress(step: int, total: int, share: float) -> None:
    assert progress(step, total) == share


@pytest.mark.parametrize(("step", "total"), [(-1, 10), (0, 0)])
def test_progress_refuses_what_is_no_step(step: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"step={step} .*total_steps={total}"):
        progress(step, total)


def test_between_is_exact_at_both_ends() -> None:
    assert between(0.1, 0.7, 0.0) == 0.1
    assert between(0.1, 0.7, 1.0) == 0.7
    assert between(2.0, 4.0, 0.25) == 2.5
