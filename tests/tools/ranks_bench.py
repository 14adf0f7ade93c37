"""What the ranks of the benchmarks' tests run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from tools.bench import handoff, rollout


def hand_over(model: Path) -> dict[str, float]:
    return handoff.rank_figures(Namespace(model=model, dtype="fp32", rounds=2, repeats=3))


def sampling() -> dict[str, Any]:
    return rollout.measure(Namespace(model=rollout.MODEL, dtype="fp32", tasks=3, samples=2, new=4, rounds=2))
