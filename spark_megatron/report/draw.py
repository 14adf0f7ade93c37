"""Drawing on one axes: lines with labels at their ends, stacked bands, bars with intervals. No legends, no frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from spark_megatron.report.load import Series
from spark_megatron.report.style import KIND_COLOURS, SPARE_COLOURS, colour, label_of
from spark_megatron.types import Interval

POINTS = 300
"""At most this many points of a line are drawn; longer ones are averaged."""
LABEL_GAP = 0.085
"""Least distance of two labels, as a share of the axes' height."""


@dataclass(frozen=True)
class Line:
    """A series with the label at its end ("" shows its last value alone) and the name of its colour."""

    series: Series
    label: str
    colour: str


def draw_lines(
    ax: Axes,
    lines: Sequence[Line],
    *,
    unit: bool = False,
    log: bool = False,
    smooth: bool = True,
    markers: bool = False,
) -> None:
    """The lines over the steps. ``smooth`` draws a running mean boldly over the pale values; ``unit`` fixes 0 to 1."""
    base(ax)
    ends = []
    for line in lines:
        raw = thin(line.series)
        window = max(1, len(raw.values) // 25) if smooth else 1
        if window > 1:
            ax.plot(raw.steps, raw.values, color=colour(line.colour), linewidth=1, alpha=0.28)
        values = running_mean(raw.values, window)
        (drawn,) = ax.plot(raw.steps, values, color=colour(line.colour), linewidth=1.9)
        if markers or len(values) == 1:
            drawn.set(marker="o", markersize=4.5, clip_on=False)
        ends.append(values[-1])
    if log and all(v > 0 for line in lines for v in line.series.values):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(0, 0)))
        ax.minorticks_off()
    elif unit and all(0 <= v <= 1 for line in lines for v in line.series.values):
        ax.set_ylim(0, 1.02)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    else:
        _room(ax, [v for line in lines for v in line.series.values])
    _steps_axis(ax)
    texts = [f"{line.label} {short(end)}".strip() for line, end in zip(lines, ends, strict=True)]
    end_labels(ax, ends, texts, [line.colour for line in lines])


def draw_stack(ax: Axes, bands: Sequence[Line]) -> None:
    """The bands on top of each other, each with its mean at the mean's height; bands under 1 % stay without a label."""
    base(ax)
    steps = sorted({step for band in bands for step in band.series.steps})
    columns = [dict(zip(band.series.steps, band.series.values, strict=True)) for band in bands]
    filled = [thin(Series(steps, [column.get(step, 0.0) for step in steps])) for column in columns]
    at = filled[0].steps
    floor = [0.0] * len(at)
    for band, series in zip(bands, filled, strict=True):
        top = [low + value for low, value in zip(floor, series.values, strict=True)]
        if len(at) > 1:
            ax.fill_between(at, floor, top, step="mid", color=colour(band.colour), linewidth=0)
        else:
            ax.bar(at, series.values, 0.5, bottom=floor, color=colour(band.colour))
        floor = top
    ceiling = 1.08 * max(floor[1:] or floor)
    ax.set_ylim(0, ceiling or 1)
    _steps_axis(ax)
    later = [series.values[1:] or series.values for series in filled]
    means = [sum(values) / len(values) for values in later]
    heights = [sum(means[:i]) + mean / 2 for i, mean in enumerate(means)]
    shown = [i for i, mean in enumerate(means) if mean > 0.01 * sum(means)]
    texts = [f"{bands[i].label} {means[i]:.2f} s" for i in shown]
    end_labels(ax, [heights[i] for i in shown], texts, [bands[i].colour for i in shown])


def draw_bars(ax: Axes, evals: Mapping[str, Mapping[str, Interval]]) -> None:
    """Per tested kind, a grey bar before and a coloured one after, with the 95 % interval and the value above it."""
    base(ax)
    names = list(dict.fromkeys(name for part in evals.values() for name in part))
    width = 0.36
    for i, name in enumerate(names):
        tone = KIND_COLOURS.get(name, SPARE_COLOURS[0])
        for when, shift in (("before", -width / 2 - 0.01), ("after", width / 2 + 0.01)):
            if (interval := evals.get(when, {}).get(name)) is None:
                continue
            low, high = interval.ci
            ax.bar(i + shift, interval.acc, width, color=colour("before" if when == "before" else tone))
            ax.plot([i + shift] * 2, [low, high], color=colour("ink"), linewidth=1.1)
            text = f"{100 * interval.acc:.0f}"
            ax.text(i + shift, high + 0.02, text, ha="center", va="bottom", fontsize=9, color=colour("ink"))
    ax.set_xticks(range(len(names)), [label_of(name) for name in names], fontsize=9, color=colour("soft"))
    ax.set_xlim(-0.6, max(len(names), 2) - 0.4)
    ax.set_ylim(0, 1.09)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))


def base(ax: Axes) -> None:
    """No frame but a base line, pale horizontal guides, small soft numbers."""
    ax.set_facecolor("none")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(colour("muted"))
    ax.spines["bottom"].set_linewidth(0.8)
    ax.tick_params(length=0, labelsize=9, labelcolor=colour("soft"), pad=4)
    ax.grid(axis="y", color=colour("grid"), linewidth=0.8)
    ax.set_axisbelow(True)
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, max(map(abs, ax.get_ylim())))))


def end_labels(ax: Axes, heights: Sequence[float], texts: Sequence[str], colours: Sequence[str]) -> None:
    """Each text right of the axes at its height (data units), moved apart where two would overlap."""
    to_share = ax.transData + ax.transAxes.inverted()
    x = ax.get_xlim()[0]
    shares = [min(1.0, max(0.0, float(to_share.transform((x, height))[1]))) for height in heights]
    for share, text, name in zip(spread(shares, LABEL_GAP), texts, colours, strict=True):
        dot = ax.transAxes + ScaledTranslation(7 / 72, 0, ax.figure.dpi_scale_trans)
        ax.plot(1, share, "o", transform=dot, color=colour(name), markersize=5, clip_on=False)
        ax.annotate(
            text,
            xy=(1, share),
            xycoords="axes fraction",
            xytext=(13, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=colour("ink"),
            parse_math=False,
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """``positions`` in [0, 1], moved as little as it takes for neighbours to be ``gap`` apart; their order is kept.

    Overlapping ones form a block around their common mean (pool adjacent violators on the positions less i * gap).
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    blocks: list[tuple[float, int]] = []
    for rank, i in enumerate(order):
        mean, size = positions[i] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            other, count = blocks.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        blocks.append((mean, size))
    lowest = [mean for mean, size in blocks for _ in range(size)]
    ceiling = 1 - (len(positions) - 1) * gap
    placed = [0.0] * len(positions)
    for rank, i in enumerate(order):
        placed[i] = max(0.0, min(ceiling, lowest[rank])) + rank * gap
    return placed


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` values before it: it never knows the future."""
    means = []
    for i in range(len(values)):
        recent = values[max(0, i + 1 - window) : i + 1]
        means.append(sum(recent) / len(recent))
    return means


def thin(series: Series, points: int = POINTS) -> Series:
    """At most ``points`` points: the means of consecutive runs of equal length, at the last step of each."""
    size = math.ceil(len(series.steps) / points)
    cuts = range(0, len(series.steps), size) if size > 1 else []
    if not cuts:
        return series
    parts = [series.values[cut : cut + size] for cut in cuts]
    return Series(
        [series.steps[min(cut + size, len(series.steps)) - 1] for cut in cuts], [sum(p) / len(p) for p in parts]
    )


def short(value: float) -> str:
    """About three digits: 0.0123, 0.82, 34.5, 1,234, 12.3k, 1.2e-05."""
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if size >= 1e4:
        return f"{value / 1e3:.1f}".removesuffix(".0") + "k"
    if size >= 100:
        return f"{value:,.0f}"
    text = f"{value:.{1 if size >= 10 else 2 if size >= 0.1 else 4}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tick(value: float, largest: float) -> str:
    """A number at the axis, in the unit that suits the largest."""
    return f"{value / 1e3:g}k" if value and 1e4 <= largest < 1e7 else short(value)


def _room(ax: Axes, values: Sequence[float]) -> None:
    """Limits by the values, from 0 where all are positive and 0 is not far off."""
    low, high = min(values), max(values)
    if low >= 0 and low < 0.5 * high:
        low = 0.0
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    ax.set_ylim(low if low == 0 else low - margin, high + margin)


def _steps_axis(ax: Axes) -> None:
    ax.margins(x=0)
    low, high = ax.get_xlim()
    if high - low < 2:
        ax.set_xlim((low + high) / 2 - 1.0, (low + high) / 2 + 1.0)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.set_xlabel("step", fontsize=9, color=colour("soft"), loc="right", labelpad=1)
