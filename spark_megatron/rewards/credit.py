"""What a program earns that passes only some of its tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Passed = Sequence[Sequence[bool]]
"""[programs, tests]: the programs of one group, and which of the task's tests each passes."""


class Credit(Protocol):
    """The rewards of a group's programs, each in [0, 1]; 1 only for a program that passes everything."""

    def __call__(self, passed: Passed) -> list[float]: ...


@dataclass(frozen=True)
class PassedShare:
    """The share of the tests that a program passes."""

    def __call__(self, passed: Passed) -> list[float]:
        return [sum(row) / len(row) for row in passed]


@dataclass(frozen=True)
class RareTests:
    """Tests that few programs of the group pass count more (ours, after the idea of VeRPO, arXiv 2601.03525).

    With the pass rate rho_j of test j over the group, its weight is w_j = (1 - rho_j) / sum_k (1 - rho_k), and program
    i earns ``outcome_share`` for passing everything plus the rest times sum_j w_j P_ij. VeRPO weighs tests by the
    group's pass rates too; the form of the weight and the mixture are ours. Where every program passes everything, the
    weights are equal.
    """

    outcome_share: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.outcome_share <= 1.0:
            raise ValueError(f"outcome_share={self.outcome_share}: must lie in [0, 1]")

    def __call__(self, passed: Passed) -> list[float]:
        failing = [1.0 - sum(column) / len(passed) for column in zip(*passed, strict=True)]
        total = sum(failing)
        weights = [rate / total for rate in failing] if total else [1.0 / len(failing)] * len(failing)
        return [self._reward(row, weights) for row in passed]

    def _reward(self, row: Sequence[bool], weights: Sequence[float]) -> float:
        if all(row):
            return 1.0
        dense = sum(weight for weight, test in zip(weights, row, strict=True) if test)
        return min((1.0 - self.outcome_share) * dense, 1.0)
