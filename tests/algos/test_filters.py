import pytest

from spark_megatron.algos.filters import is_flat


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
