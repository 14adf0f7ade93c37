"""The reward of a policy from a reward model and a rule verifier."""

from __future__ import annotations

from collections.abc import Sequence


def blend(scored: Sequence[float | None], ruled: Sequence[float | None], rule_share: float) -> tuple[float | None, ...]:
    """``(1 - rule_share) * scored + rule_share * ruled`` per rollout (ours; Cooper has a share of 0).

    None masks a rollout out; a reward whose share is 0 cannot mask.
    """
    if not 0.0 <= rule_share <= 1.0:
        raise ValueError(f"rule_share={rule_share}: must lie in [0, 1]")
    return tuple(_one(s, r, rule_share) for s, r in zip(scored, ruled, strict=True))


def _one(scored: float | None, ruled: float | None, rule_share: float) -> float | None:
    parts = [(scored, 1 - rule_share), (ruled, rule_share)]
    total = 0.0
    for reward, share in parts:
        if share:
            if reward is None:
                return None
            total += share * reward
    return total
