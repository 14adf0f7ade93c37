"""Drawing helpers against values, and drawings against what they must show."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spark_megatron.report.draw import Line, draw_bars, draw_lines, draw_stack, running_mean, short, spread, thin
from spark_megatron.report.load import Series
from spark_megatron.types import Interval


def axes() -> tuple[Figure, object]:
    figure = Figure(figsize=(5, 2.65))
    FigureCanvasAgg(figure)
    return figure, figure.add_axes((0.1, 0.15, 0.6, 0.8))


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_spread_moves_as_little_as_it_takes() -> None:
    assert spread([0.2, 0.8], 0.1) == pytest.approx([0.2, 0.8])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert spread([0.52, 0.5, 0.9], 0.1) == pytest.approx([0.56, 0.46, 0.9])
    assert spread([0.0, 0.0, 1.0, 1.0], 0.1) == pytest.approx([0.0, 0.1, 0.9, 1.0])
    assert spread([], 0.1) == []


def test_running_mean_does_not_know_the_future() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert running_mean([1.0, 3.0], 1) == [1.0, 3.0]


def test_thin_keeps_the_mean_and_the_last_step() -> None:
    series = Series(list(range(1, 11)), [float(i) for i in range(10)])
    assert thin(series, 10) is series
    assert thin(series, 5) == Series([2, 4, 6, 8, 10], [0.5, 2.5, 4.5, 6.5, 8.5])
    assert thin(series, 4) == Series([3, 6, 9, 10], [1.0, 4.0, 7.0, 9.0])


def test_short_numbers() -> None:
    values = (0.0, 0.5, 0.817, 0.01234, 12.34, 100.0, 1234.0, 12345.0, 3.7e-5, 1e-5, -0.5, 2.5e8)
    assert [short(v) for v in values] == [
        "0", "0.5", "0.82", "0.0123", "12.3", "100", "1,234", "12.3k", "3.7e-5", "1e-5", "-0.5", "2.5e8",
    ]  # fmt: skip


def test_lines_end_in_their_name_and_last_value() -> None:
    figure, ax = axes()
    draw_lines(ax, [Line(Series([1, 2], [0.1, 0.9]), "solve", "blue"), Line(Series([2], [0.85]), "reflect", "violet")])
    assert texts(figure) == ["solve 0.9", "reflect 0.85"]


@pytest.mark.parametrize(("values", "scale"), [([1e-5, 1e-3], "log"), ([0.0, 1e-3], "linear")])
def test_a_zero_does_not_break_a_log_axis(values: list[float], scale: str) -> None:
    _, ax = axes()
    draw_lines(ax, [Line(Series([1, 2], values), "", "red")], log=True)
    assert ax.get_yscale() == scale


@pytest.mark.parametrize(("values", "limits"), [([0.2, 0.9], (0, 1.02)), ([-0.5, 0.9], (-0.584, 0.984))])
def test_unit_limits_hold_unless_a_value_is_outside(values: list[float], limits: tuple[float, float]) -> None:
    _, ax = axes()
    draw_lines(ax, [Line(Series([1, 2], values), "", "blue")], unit=True)
    assert ax.get_ylim() == pytest.approx(limits)


@pytest.mark.parametrize("smooth", [True, False])
def test_smoothing_adds_a_bold_line_to_the_pale_one(smooth: bool) -> None:
    _, ax = axes()
    draw_lines(ax, [Line(Series(list(range(100)), [float(i % 2) for i in range(100)]), "", "blue")], smooth=smooth)
    widths = [line.get_linewidth() for line in ax.lines if len(line.get_xdata()) == 100]
    assert len(widths) == (2 if smooth else 1)


def test_the_first_step_does_not_set_the_scale_of_the_stack() -> None:
    figure, ax = axes()
    bands = [Line(Series([1, 2, 3], [60.0, 2.0, 3.0]), "rollout", "yellow"), Line(Series([3], [1.0]), "eval", "steel")]
    draw_stack(ax, bands)
    assert ax.get_ylim() == pytest.approx((0, 4 * 1.08))
    assert texts(figure) == ["rollout 2.50 s", "eval 0.50 s"]


def test_bars_show_both_values_and_their_intervals() -> None:
    figure, ax = axes()
    evals = {
        "before": {"solve": Interval(0.25, (0.2, 0.3), 9)},
        "after": {"solve": Interval(0.5, (0.4, 0.6), 9), "x_bench": Interval(1.0, (0.9, 1.0), 9)},
    }
    draw_bars(ax, evals)
    assert texts(figure) == ["25", "50", "100"]
    assert [tuple(line.get_ydata()) for line in ax.lines] == [(0.2, 0.3), (0.4, 0.6), (0.9, 1.0)]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["solve", "x bench"]
