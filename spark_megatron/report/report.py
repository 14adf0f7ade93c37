"""From a run directory to its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spark_megatron.report.facts import run_facts
from spark_megatron.report.figures import save_picture
from spark_megatron.report.load import Run, load_run
from spark_megatron.report.page import render_page
from spark_megatron.report.panels import panels_for


@dataclass(frozen=True)
class Report:
    """The files of a report, and in words what it had to do without."""

    picture: Path
    page: Path
    missing: tuple[str, ...]


def make_report(directory: str | Path, into: str | Path | None = None) -> Report:
    """Write ``report.png`` and ``report.html`` of the run in ``directory`` to ``into`` (by default beside the metrics).

    Works while the run is still on. Inputs that are missing or unreadable are named in the report and in the result.
    Raises ValueError where ``directory`` does not exist.
    """
    run = load_run(Path(directory))
    target = Path(into) if into is not None else Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    picture, page = target / "report.png", target / "report.html"
    subtitle = describe(run)
    absent = ", ".join(dict.fromkeys(text.split()[0] for text in run.missing))
    partial = f"Partial: something is missing in {absent}." if absent else ""
    save_picture(panels_for(run), picture, run.name, "   ".join(part for part in (subtitle, partial) if part))
    page.write_text(render_page(run, subtitle), encoding="utf-8", errors="backslashreplace")
    return Report(picture=picture, page=page, missing=tuple(run.missing))


def describe(run: Run) -> str:
    """The run in one line: model, layout, seed, steps, duration, as far as they are known."""
    facts = run_facts(run)
    if "Steps" in facts:
        facts["Steps"] += " step" if facts["Steps"] == "1" else " steps"
    if "Seed" in facts:
        facts["Seed"] = f"seed {facts['Seed']}"
    return " · ".join(facts[label] for label in ("Model", "Layout", "Seed", "Steps", "Duration") if label in facts)
