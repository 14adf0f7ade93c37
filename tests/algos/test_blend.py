"""The blend of two rewards by hand."""

import pytest

from spark_megatron.algos.blend import blend


def test_shares_by_hand() -> None:
    """0.75 * 0.8 + 0.25 * 1 = 0.85; 0.75 * 0.4 = 0.3."""
    assert blend([0.8, 0.4], [1.0, 0.0], 0.25) == pytest.approx((0.85, 0.3))


def test_only_a_reward_that_counts_can_mask() -> None:
    assert blend([0.8, None, 0.4], [None, 1.0, None], 0.0) == (0.8, None, 0.4)
    assert blend([0.8, None, 0.4], [None, 1.0, 0.0], 1.0) == (None, 1.0, 0.0)
    assert blend([0.8, None], [None, 1.0], 0.5) == (None, None)


def test_a_share_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rule_share=1\.5"):
        blend([0.8], [1.0], 1.5)
