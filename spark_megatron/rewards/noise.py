"""Wrong labels on purpose: how much a method bears of a verifier that errs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spark_megatron.types import Group, Metrics, TaskKind, Verdict

_KINDS: tuple[TaskKind, ...] = ("solve", "reflect")
"""Whose verdicts come from a verifier of answers. A judge task's gold label is made from those, flipped or not."""


@dataclass(frozen=True, kw_only=True)
class LabelNoise:
    """Turns right verdicts wrong and wrong ones right, each with the probability of its class.

    Which ones is a fixed function of the run's seed, the task's id and the sample's place in its group. Only verdicts
    ``ok`` with reward 0 or 1 are touched. For training alone: an evaluation never passes through here.
    """

    right_to_wrong: float
    wrong_to_right: float

    def __post_init__(self) -> None:
        for name in ("right_to_wrong", "wrong_to_right"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: must lie in [0, 1]")

    @property
    def active(self) -> bool:
        return self.right_to_wrong > 0 or self.wrong_to_right > 0

    @property
    def warning(self) -> str:
        """What to tell the user of a run with noise."""
        return (
            f"LABEL NOISE IS ON: label_noise.right_to_wrong={self.right_to_wrong} and "
            f"label_noise.wrong_to_right={self.wrong_to_right} turn that share of the verifier's labels into their "
            "opposite, in training only. Set both to 0 unless this run is a study of robustness."
        )

    def __call__(self, groups: Sequence[Group], seed: int) -> list[Group]:
        """The groups with their verdicts, some of which are flipped and say so."""
        return [self._noisy(group, seed) if group.task.kind in _KINDS else group for group in groups]

    def _noisy(self, group: Group, seed: int) -> Group:
        verdicts = [self._flip(v, f"{seed}\0{group.task.id}\0{i}") for i, v in enumerate(group.verdicts)]
        return replace(group, verdicts=tuple(verdicts))

    def _flip(self, verdict: Verdict, key: str) -> Verdict:
        share = {1.0: self.right_to_wrong, 0.0: self.wrong_to_right}.get(verdict.reward, 0.0)
        if verdict.status != "ok" or _uniform(key) >= share:
            return verdict
        return replace(verdict, reward=1.0 - verdict.reward, flipped=True)


def flip_figures(groups: Iterable[Group]) -> Metrics:
    """The shares of verdicts that were really flipped, by what the verifier had said; absent where it never said so."""
    seen: dict[str, list[bool]] = {"right_to_wrong": [], "wrong_to_right": []}
    for group in groups:
        for verdict in group.verdicts if group.task.kind in _KINDS else ():
            if verdict.status == "ok" and verdict.reward in (0.0, 1.0):
                was_right = (verdict.reward == 1.0) != verdict.flipped
                seen["right_to_wrong" if was_right else "wrong_to_right"].append(verdict.flipped)
    return {f"label_noise/{name}": sum(flips) / len(flips) for name, flips in seen.items() if flips}


def _uniform(key: str) -> float:
    """A number in [0, 1) that depends on nothing but the key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48
