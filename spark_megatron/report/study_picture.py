"""The picture of a study: every skill of every method, with its interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from spark_megatron.report.draw import base
from spark_megatron.report.figures import save_picture
from spark_megatron.report.panels import Panel
from spark_megatron.report.study import SKILLS
from spark_megatron.report.style import KIND_COLOURS, colour, label_of


def save_study(results: Mapping[str, Any], path: Path) -> None:
    """A row of panels per half of the study, one for each skill."""
    panels = [
        Panel(
            f"{label_of(skill)}, equal {half}",
            "Held-out accuracy: mean over seeds and 95 % interval.",
            partial(_draw, figures={method: of[skill] for method, of in found.items()}, tone=KIND_COLOURS[skill]),
            (skill,),
            room=0.35,
        )
        for half, found in results.items()
        for skill in SKILLS
    ]
    methods = len(next(iter(results.values())))
    save_picture(panels, path, "Study", f"{methods} methods", columns=len(SKILLS))


def _draw(ax: Axes, figures: Mapping[str, Mapping[str, float]], tone: str) -> None:
    base(ax)
    for place, (method, figure) in enumerate(figures.items()):
        mean, low, high = (figure[name] for name in ("mean", "low", "high"))
        shade = colour("before" if method == "untrained" else tone)
        if not math.isnan(low):
            ax.plot([place, place], [low, high], color=shade, linewidth=2.2, alpha=0.5)
        ax.plot([place], [mean], marker="o", markersize=6, color=shade)
        ax.annotate(
            f"{100 * mean:.1f}", (place, mean), (6, 0), textcoords="offset points", va="center", fontsize=8,
            color=colour("soft"),
        )  # fmt: skip
    ax.set_xlim(-0.5, len(figures) - 0.2)
    ax.set_xticks(range(len(figures)), [name.replace("_", "\n") for name in figures], fontsize=8)
