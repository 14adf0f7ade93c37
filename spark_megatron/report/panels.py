"""Which small charts a run has. Each panel draws itself on an axes; what to draw follows from what was logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from spark_megatron.report.draw import Line, draw_bars, draw_lines, draw_stack
from spark_megatron.report.load import Run
from spark_megatron.report.style import COMPONENT_COLOURS, KIND_COLOURS, PHASE_COLOURS, SPARE_COLOURS, label_of


@dataclass(frozen=True)
class Panel:
    """A chart: its title, one sentence on how to read it, and its drawing."""

    title: str
    note: str
    draw: Callable[[Axes], None]
    names: tuple[str, ...]
    """The metrics that it shows."""
    room: float = 1.28
    """Inches that its labels take on the right."""


def panels_for(run: Run) -> list[Panel]:
    """The panels of everything that this run logged, the most telling first."""
    made = [
        _before_after(run),
        _lines(run, "Training reward", "Mean reward of a step's rollouts, per task kind.", _kinds("reward"), unit=True),
        _evaluations(run),
        *_judging(run),
        _lines(run, "KL to the reference", "Per token, in nats.", [("policy/kl", "", "blue")]),
        _lines(run, "Entropy", "Of the policy, per token, in nats.", [("policy/entropy", "", "blue")]),
        _lines(run, "Objective weights", "What each term counts in the loss.", _components(run), smooth=False),
        _lines(run, "Response length", "Mean tokens of a response, per task kind.", _kinds("length")),
        _lines(run, "Gradient norm", "Before clipping.", [("policy/grad_norm", "", "blue")]),
        _lines(
            run,
            "Trainer against sampler",
            "Absolute difference of their log-probs for the same tokens.",
            [("mismatch/max_abs", "largest", "red"), ("mismatch/mean_abs", "mean", "blue")],
            log=True,
        ),
        _lines(
            run,
            "Sampled tokens to the trainer",
            "Their effective share as weighted samples, and the share that is far off or rejected.",
            [
                ("mismatch/effective_share", "effective", "blue"),
                ("mismatch/outside_share", "far off", "red"),
                ("mismatch/rejected_share", "rejected", "violet"),
            ],
            unit=True,
        ),
        _lines(
            run,
            "Groups",
            "Share of flat groups (no signal) and of distinct responses.",
            [("groups/flat_share", "flat", "red"), ("groups/distinct_share", "distinct", "blue")],
            unit=True,
        ),
        _lines(run, "Clipped tokens", "Share at the policy ratio's bounds.", [("policy/clip_frac", "", "blue")]),
        _lines(run, "Loss", "Of supervised training, per token, in nats.", [("sft/loss", "", "blue")]),
        _lines(run, "Gradient norm", "Before clipping.", [("sft/grad_norm", "", "blue")]),
        _lines(run, "Learning rate", "", [("policy/lr", "", "blue"), ("sft/lr", "", "blue")], smooth=False),
        _phases(run),
        _lines(run, "Tokens per second", "Over the whole step.", [("tokens/per_s", "", "blue")]),
    ]
    return [panel for panel in made if panel is not None]


def other_panels(run: Run, shown: Sequence[Panel]) -> list[Panel]:
    """A plain panel for every metric that no other panel shows, but for status counts and times (they have tables)."""
    seen = {name for panel in shown for name in panel.names}
    rest = [n for n in run.series if n not in seen and not n.startswith(("status/", "time/"))]
    panels = (_lines(run, name, "", [(name, "", "steel")]) for name in sorted(rest))
    return [panel for panel in panels if panel is not None]


def _kinds(prefix: str) -> list[tuple[str, str, str]]:
    return [(f"{prefix}/{kind}", label_of(kind), colour) for kind, colour in KIND_COLOURS.items()]


def _components(run: Run) -> list[tuple[str, str, str]]:
    return [
        (f"weights/{name}", label_of(name), COMPONENT_COLOURS.get(name, SPARE_COLOURS[i % len(SPARE_COLOURS)]))
        for i, name in enumerate(run.named("weights/"))
    ]


def _lines(
    run: Run,
    title: str,
    note: str,
    wanted: Sequence[tuple[str, str, str]],
    *,
    unit: bool = False,
    log: bool = False,
    smooth: bool = True,
) -> Panel | None:
    """A panel of the ``wanted`` (metric, label, colour) that the run has; None where it has none of them."""
    lines = [Line(run.series[name], label, colour) for name, label, colour in wanted if name in run.series]
    if not lines:
        return None
    names = tuple(name for name, _, _ in wanted if name in run.series)
    room = 1.28 if any(line.label for line in lines) else 0.72
    return Panel(title, note, lambda ax: draw_lines(ax, lines, unit=unit, log=log, smooth=smooth), names, room)


def _judging(run: Run) -> list[Panel | None]:
    one, pair = "judge_one", "judge_pair"
    return [
        _lines(
            run,
            "Judging one answer",
            "Accuracy on right and on wrong ones, and how often it says yes.",
            [
                (f"{one}/accuracy_right", "right", "green"),
                (f"{one}/accuracy_wrong", "wrong", "red"),
                (f"{one}/yes_rate", "says yes", "steel"),
            ],
            unit=True,
        ),
        _lines(
            run,
            "Judging a pair",
            "Accuracy by which is right, and agreement of both orders.",
            [
                (f"{pair}/accuracy_first", "first", "blue"),
                (f"{pair}/accuracy_second", "second", "violet"),
                (f"{pair}/swap_consistency", "swapped", "steel"),
            ],
            unit=True,
        ),
        _lines(
            run,
            "Calibration of verdicts",
            "Expected error (ece) and squared error (Brier) of their probability.",
            [
                (f"{kind}/{figure}", f"{name} {figure}", tone)
                for kind, name, tones in ((one, "one", ("blue", "steel")), (pair, "pair", ("violet", "red")))
                for figure, tone in zip(("ece", "brier"), tones, strict=True)
            ],
        ),
    ]


def _evaluations(run: Run) -> Panel | None:
    """Held-out accuracies in mid-run: whatever was logged under ``eval/`` and lies within [0, 1]."""
    found = {name: s for name, s in run.named("eval/").items() if all(0 <= v <= 1 for v in s.values)}
    if not found:
        return None
    spare = iter(SPARE_COLOURS * len(found))
    lines = [
        Line(s, label_of(name), KIND_COLOURS.get(name.removesuffix("/acc").removesuffix("_acc")) or next(spare))
        for name, s in found.items()
    ]
    return Panel(
        "Held-out evaluation",
        "Accuracy in mid-run, per task kind.",
        lambda ax: draw_lines(ax, lines, unit=True, smooth=False, markers=True),
        tuple(f"eval/{name}" for name in found),
    )


def _before_after(run: Run) -> Panel | None:
    if not run.evals:
        return None
    return Panel(
        "Held-out accuracy",
        "Before (grey) and after (colour) training, with 95 % intervals.",
        lambda ax: draw_bars(ax, run.evals),
        (),
        room=0.1,
    )


def _phases(run: Run) -> Panel | None:
    found = run.named("time/")
    order = [*PHASE_COLOURS, *(name for name in found if name not in PHASE_COLOURS)]
    bands = [
        Line(found[name], name, PHASE_COLOURS.get(name, SPARE_COLOURS[0]))
        for name in order
        if name in found and name not in ("step", "eta")
    ]
    if not bands:
        return _lines(run, "Step time", "Seconds.", [("time/step", "", "blue")])
    note = "Seconds per phase; the numbers are means after the first step."
    return Panel("Where a step's time goes", note, lambda ax: draw_stack(ax, bands), ())
