"""Which charts a run gets, and that no text of theirs overlaps."""

from itertools import combinations
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from spark_megatron.report.load import Run, Series, load_run
from spark_megatron.report.panels import other_panels, panels_for


def test_panels_follow_what_was_logged(run_directory: Path, sft_directory: Path) -> None:
    assert [panel.title for panel in panels_for(load_run(run_directory))] == [
        "Held-out accuracy",
        "Training reward",
        "Judging one answer",
        "Judging a pair",
        "Calibration of verdicts",
        "KL to the reference",
        "Entropy",
        "Objective weights",
        "Response length",
        "Gradient norm",
        "Trainer against sampler",
        "Sampled tokens to the trainer",
        "Where a step's time goes",
        "Tokens per second",
    ]
    sft = load_run(sft_directory)
    titles = [panel.title for panel in panels_for(sft)]
    assert titles == ["Loss", "Gradient norm", "Learning rate", "Step time", "Tokens per second"]
    assert [panel.title for panel in other_panels(sft, panels_for(sft))] == ["extra/unknown"]


def test_every_metric_is_somewhere(run_directory: Path) -> None:
    run = load_run(run_directory)
    shown = panels_for(run)
    names = {name for panel in [*shown, *other_panels(run, shown)] for name in panel.names}
    assert names == {name for name in run.series if not name.startswith(("time/", "status/"))}


def test_nothing_logged_is_nothing_drawn() -> None:
    assert panels_for(Run(name="x")) == []


def test_evaluations_in_mid_run_keep_the_colours_of_their_kinds() -> None:
    series = {"eval/solve": Series([5, 10], [0.1, 0.4]), "eval/count": Series([5], [64.0])}
    run = Run(name="x", series=series)
    (panel,) = panels_for(run)
    assert (panel.title, panel.names) == ("Held-out evaluation", ("eval/solve",))
    assert [other.title for other in other_panels(run, [panel])] == ["eval/count"]


def texts_of(ax: Axes) -> list[Text]:
    """The texts that are drawn: labels, and the numbers of ticks within the axes."""
    texts = [*ax.texts, ax.xaxis.label]
    for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in texts if text.get_text()]


def test_no_text_overlaps(run_directory: Path) -> None:
    """All kinds end at the same value here: the hardest case for the labels."""
    for panel in panels_for(load_run(run_directory)):
        figure = Figure(figsize=(4.1, 2.35))
        canvas = FigureCanvasAgg(figure)
        ax = figure.add_axes((0.127, 0.18, (4.1 - 0.52 - panel.room) / 4.1, 0.78))
        panel.draw(ax)
        canvas.draw()
        boxes = [(t.get_text(), t.get_window_extent()) for t in texts_of(ax)]
        for (one, a), (other, b) in combinations(boxes, 2):
            assert not a.overlaps(b), f"{panel.title}: {one!r} and {other!r}"
        for text, box in boxes:
            assert box.x1 <= figure.bbox.x1 + 1, f"{panel.title}: {text!r} runs out of the figure"
