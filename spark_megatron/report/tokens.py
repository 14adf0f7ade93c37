"""A picture of accuracy over generated tokens, one line per method and one panel per set of questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from spark_megatron.report.draw import base, end_labels
from spark_megatron.report.figures import save_picture
from spark_megatron.report.panels import Panel
from spark_megatron.report.style import KIND_COLOURS, SPARE_COLOURS, colour, label_of
from spark_megatron.types import Interval

Curve = Sequence[tuple[float, Interval]]
"""Generated tokens per question, and the accuracy with them."""

_COLOURS = (*KIND_COLOURS.values(), *SPARE_COLOURS)


def save_token_curves(curves: Mapping[str, Mapping[str, Curve]], path: Path, subtitle: str) -> None:
    """The curves by set of questions and method, as a PNG."""
    note = "Per question, on a logarithmic axis; bars are 95 % intervals."
    panels = [Panel(name, note, partial(draw_curves, curves=of), ()) for name, of in curves.items()]
    save_picture(panels, path, "Accuracy over generated tokens", subtitle, columns=2)


def draw_curves(ax: Axes, curves: Mapping[str, Curve]) -> None:
    """A line per method, with the interval of each point and the last accuracy at its end."""
    base(ax)
    ends, texts = [], []
    for (method, curve), tone in zip(curves.items(), _COLOURS, strict=False):
        tokens, values = [at for at, _ in curve], [interval.acc for _, interval in curve]
        ax.vlines(tokens, *zip(*(i.ci for _, i in curve), strict=True), color=colour(tone), linewidth=1, alpha=0.4)
        ax.plot(tokens, values, color=colour(tone), linewidth=1.9, marker="o", markersize=4)
        ends.append(values[-1])
        texts.append(f"{label_of(method)} {100 * values[-1]:.1f} %")
    bounds = [bound for curve in curves.values() for _, interval in curve for bound in interval.ci]
    low, high = min(bounds), max(bounds)
    margin = 0.06 * (high - low) or 0.05
    ax.set_ylim(low - margin, high + margin)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    ax.set_xlabel("tokens", fontsize=9, color=colour("soft"), loc="right", labelpad=1)
    end_labels(ax, ends, texts, list(_COLOURS[: len(ends)]))
