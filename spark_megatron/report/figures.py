"""Panels as files: one picture of all of them, or one SVG for each."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from spark_megatron.report.panels import Panel
from spark_megatron.report.style import colour, with_variables

WIDTH, HEIGHT = 5.0, 2.65
"""Of a panel's drawing in the picture, in inches, with its axis numbers and end labels."""
SVG_WIDTH, SVG_HEIGHT = 4.1, 2.35
"""The same on the page, where a panel is shown at about this size, so that its text can be read."""
_LEFT, _BOTTOM, _TOP = 0.52, 0.42, 0.1
_TITLE, _GAP, _HEAD, _EDGE = 0.62, 0.25, 0.95, 0.35
_DPI = 120


def save_picture(panels: Sequence[Panel], path: Path, title: str, subtitle: str, columns: int = 3) -> None:
    """All panels in a grid under a title, as a PNG. Without panels the picture says that there is nothing to show."""
    columns = max(1, min(columns, len(panels)))
    rows = -(-len(panels) // columns)
    width = max(8.0, 2 * _EDGE + columns * WIDTH + (columns - 1) * _GAP)
    height = _HEAD + max(1.0, rows * (HEIGHT + _TITLE)) + _EDGE
    figure = Figure(figsize=(width, height), facecolor=colour("surface"))
    FigureCanvasAgg(figure)
    _write(figure, _EDGE, height - 0.48, title, 17, "ink", weight="bold")
    _write(figure, _EDGE, height - 0.76, subtitle if panels else "Nothing to show yet.", 10.5, "soft")
    for i, panel in enumerate(panels):
        left = _EDGE + (i % columns) * (WIDTH + _GAP)
        top = height - _HEAD - (i // columns) * (HEIGHT + _TITLE)
        _write(figure, left, top - 0.3, panel.title, 12, "ink", weight="bold")
        _write(figure, left, top - 0.5, panel.note, 9, "soft")
        _draw(figure, panel, (left, top - _TITLE - HEIGHT), (WIDTH, HEIGHT))
    figure.savefig(path, dpi=_DPI)


def panel_svg(panel: Panel) -> str:
    """One panel without its title, as an inline SVG whose colours are the page's CSS variables."""
    figure = Figure(figsize=(SVG_WIDTH, SVG_HEIGHT), facecolor="none")
    FigureCanvasSVG(figure)
    _draw(figure, panel, (0.0, 0.0), (SVG_WIDTH, SVG_HEIGHT))
    stream = io.StringIO()
    # Real text (not outlines), and ids that depend on the content alone, so that equal ids mean equal things.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "spark"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>", "", stream.getvalue(), flags=re.S)
    return with_variables(svg[svg.index("<svg") :]).replace("<svg ", '<svg role="img" ', 1)


def _draw(figure: Figure, panel: Panel, corner: tuple[float, float], size: tuple[float, float]) -> None:
    """Draw ``panel`` with its lower left ``corner`` and its (width, height) ``size`` in inches."""
    width, height = figure.get_size_inches()
    box = (
        (corner[0] + _LEFT) / width,
        (corner[1] + _BOTTOM) / height,
        (size[0] - _LEFT - panel.room) / width,
        (size[1] - _BOTTOM - _TOP) / height,
    )
    panel.draw(figure.add_axes(box))


def _write(figure: Figure, x: float, y: float, text: str, size: float, tone: str, weight: str = "normal") -> None:
    """Text at (x, y) inches. A dollar sign stays one, instead of opening a formula."""
    width, height = figure.get_size_inches()
    figure.text(x / width, y / height, text, fontsize=size, color=colour(tone), weight=weight, parse_math=False)
