from pathlib import Path

import pytest
from matplotlib.figure import Figure

from spark_megatron.report.tokens import draw_curves, save_token_curves
from spark_megatron.tracking.intervals import wilson

CURVES = {
    "reflect": [(6.0, wilson(50, 100)), (12.0, wilson(60, 100))],
    "best_of_n": [(6.0, wilson(50, 100)), (20.0, wilson(70, 100)), (60.0, wilson(80, 100))],
}


def test_a_line_per_method_with_its_last_accuracy_at_its_end() -> None:
    ax = Figure().add_subplot()
    draw_curves(ax, CURVES)
    drawn = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in ax.lines if len(line.get_xdata()) > 1}
    assert drawn == {(6.0, 12.0): (0.5, 0.6), (6.0, 20.0, 60.0): (0.5, 0.7, 0.8)}
    assert [text.get_text() for text in ax.texts] == ["reflect 60.0 %", "best of n 80.0 %"]
    low, high = ax.get_ylim()
    assert low < wilson(50, 100).ci[0]
    assert high > wilson(80, 100).ci[1]
    assert ax.get_xscale() == "log"
    (bars, *_) = ax.collections
    drawn = [height for segment in bars.get_segments() for height in segment[:, 1]]
    assert drawn == pytest.approx([*wilson(50, 100).ci, *wilson(60, 100).ci])


def test_a_picture_of_several_sets(tmp_path: Path) -> None:
    save_token_curves({"held-out": CURVES, "GSM8k": CURVES}, tmp_path / "tokens.png", "a model")
    assert (tmp_path / "tokens.png").stat().st_size > 10_000
