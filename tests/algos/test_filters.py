import pytest

from spark_megatron.algos.filters import distinct_share, flat_share, is_flat


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ([0.7] * 8, True),
        ([1.0, 0.0], False),
        ([1.0], True),
        ([], True),
        ([None, None], True),
        ([None, 1.0, 1.0], True),
        ([None, 1.0, 0.0], False),
        ([0.0, None], True),
        ([0.0, -0.0], True),
    ],
)
def test_is_flat(rewards: list[float | None], flat: bool) -> None:
    assert is_flat(rewards) is flat


def test_flat_share_counts_groups() -> None:
    assert flat_share([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [None, 1.0]]) == 0.75
    assert flat_share([]) == 0.0


def test_distinct_share_is_the_mean_over_groups() -> None:
    # 1 of 4 and 2 of 2: (0.25 + 1) / 2.
    assert distinct_share([["a", "a", "a ", "\na"], ["a", "b"]]) == 0.625


def test_distinct_share_leaves_out_empty_groups() -> None:
    assert distinct_share([[], ["a", "a"]]) == 0.5
    assert distinct_share([]) == 1.0
