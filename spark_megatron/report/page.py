"""The page: one file of HTML with everything inside, no script and no request to anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import yaml

from spark_megatron.report.examples import Example
from spark_megatron.report.facts import duration, label_noise, phase_times, reward_change, run_facts, status_counts
from spark_megatron.report.figures import panel_svg
from spark_megatron.report.load import Run
from spark_megatron.report.panels import Panel, other_panels, panels_for
from spark_megatron.report.style import CSS, KIND_COLOURS, PHASE_COLOURS, SPARE_COLOURS, label_of
from spark_megatron.tracking.intervals import difference
from spark_megatron.tracking.metrics import STATUSES
from spark_megatron.types import Interval

# Nothing may load or run, even if a rollout found a way through the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MAX_TEXT = 6000
"""Characters of a rollout or prompt that the page shows."""


def render_page(run: Run, subtitle: str) -> str:
    """The report of ``run`` as a complete HTML document."""
    panels = panels_for(run)
    body = [
        f"<header><h1>{escape(run.name)}</h1><p class='lead'>{escape(subtitle)}</p></header>",
        _missing(run),
        _noise(run),
        _tiles(run),
        _before_after(run),
        _figures("Over the run", panels),
        f"<div class='columns'>{_facts(run)}{_phases(run)}</div>",
        _statuses(run),
        _examples(run),
        _others(run, panels),
        _config(run),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(run.name)}</title><style>{CSS}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _missing(run: Run) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in run.missing)
    return f"<div class='missing'><b>This report is partial.</b><ul>{items}</ul></div>" if items else ""


def _noise(run: Run) -> str:
    text = label_noise(run)
    return f"<div class='missing'><b>Label noise:</b> {escape(text)}.</div>" if text else ""


def _tiles(run: Run) -> str:
    """The headline figures: held-out accuracy where it was tested after the training, else the training reward."""
    tiles = []
    after, before = run.evals.get("after", {}), run.evals.get("before", {})
    rewards = reward_change(run)
    for kind in dict.fromkeys([*after, *([] if after else rewards)]):
        if kind in after:
            value = _percent(after[kind].acc)
            note = f"held out, was {_percent(before[kind].acc)}" if kind in before else "held out, after training"
        else:
            value, note = f"{rewards[kind][1]:.2f}", f"training reward, began at {rewards[kind][0]:.2f}"
        tiles.append(
            f"<div class='tile' style='--tone: var(--{_tone(kind)})'>"
            f"<span>{escape(label_of(kind))}</span><b>{value}</b><span>{note}</span></div>"
        )
    return f"<div class='tiles'>{''.join(tiles)}</div>" if tiles else ""


def _before_after(run: Run) -> str:
    if not run.evals:
        return ""
    before, after = run.evals.get("before", {}), run.evals.get("after", {})
    rows = []
    for name in dict.fromkeys([*before, *after]):
        one, two = before.get(name), after.get(name)
        sizes = " / ".join(str(i.n) for i in (one, two) if i is not None and not (i is two and one and one.n == two.n))
        rows.append([_named(name, _tone(name)), _accuracy(one), _accuracy(two), _change(one, two), sizes])
    note = (
        "In brackets: 95 % intervals, those of the change for two independent samples (somewhat too wide where both "
        "tests used the same tasks). A change in colour has an interval without 0."
    )
    table = _table(["held out", "before", "after", "change", "tasks"], rows)
    return f"<section><h2>Before and after</h2>{table}<p class='note' style='margin-top: 6px'>{note}</p></section>"


def _accuracy(interval: Interval | None) -> str:
    if interval is None:
        return "&ndash;"
    low, high = interval.ci
    return f"{_percent(interval.acc)}<small>[{100 * low:.1f}, {100 * high:.1f}]</small>"


def _change(before: Interval | None, after: Interval | None) -> str:
    if before is None or after is None:
        return "&ndash;"
    change, (low, high) = difference(before, after)
    tone = "up" if low > 0 else "down" if high < 0 else ""
    return f"<span class='{tone}'>{100 * change:+.1f}</span><small>[{100 * low:+.1f}, {100 * high:+.1f}]</small>"


def _figures(title: str, panels: Sequence[Panel]) -> str:
    if not panels:
        return ""
    figures = "".join(
        f"<figure><figcaption><h3>{escape(p.title)}</h3><p>{escape(p.note)}</p></figcaption>{panel_svg(p)}</figure>"
        for p in panels
    )
    return f"<section><h2>{escape(title)}</h2><div class='figures'>{figures}</div></section>"


def _facts(run: Run) -> str:
    facts = run_facts(run)
    if not facts:
        return ""
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts.items())
    return f"<section><h2>The run</h2><div class='box'><table class='facts'>{rows}</table></div></section>"


def _phases(run: Run) -> str:
    rows = [
        [
            _named(t.phase, PHASE_COLOURS.get(t.phase, SPARE_COLOURS[0])),
            f"{t.mean:.2f} s",
            f"{100 * t.share:.1f} %",
            duration(t.total),
        ]
        for t in phase_times(run)
    ]
    if not rows:
        return ""
    return f"<section><h2>Time</h2>{_table(['phase', 'mean per step', 'share', 'total'], rows)}</section>"


def _statuses(run: Run) -> str:
    counts = status_counts(run)
    rows = []
    for kind, of_kind in counts.items():
        total = sum(of_kind.values())
        cells = [f"{n:,}<small>{100 * n / total:.1f} %</small>" for n in (of_kind.get(s, 0) for s in STATUSES)]
        rows.append([_named(kind, _tone(kind)), *cells, f"{total:,}"])
    if not rows:
        return ""
    note = "How the checks of all rollouts ended. Only <i>ok</i> has a reward of its own, right or wrong."
    table = _table(["rollouts", *STATUSES, "all"], rows)
    return f"<section><h2>Checks</h2>{table}<p class='note' style='margin-top: 6px'>{note}</p></section>"


def _examples(run: Run) -> str:
    parts = []
    for kind in [k for k in KIND_COLOURS if k in run.examples] + [k for k in run.examples if k not in KIND_COLOURS]:
        both = [("best", e) for e in run.examples[kind].best] + [("worst", e) for e in run.examples[kind].worst]
        cards = "".join(_example(which, example, _tone(kind)) for which, example in both)
        heading = _named(kind, _tone(kind))
        parts.append(f"<h3 style='margin-top: 18px'>{heading}</h3><div class='examples'>{cards}</div>")
    if not parts:
        return ""
    note = "Of those that were recorded: the highest and the lowest rewards, the latest first."
    return f"<section><h2>Rollouts</h2><p class='note'>{note}</p>{''.join(parts)}</section>"


def _example(which: str, example: Example, tone: str) -> str:
    facts = [f"<b>{which}</b>", f"reward <b>{example.reward:g}</b>", escape(example.status)]
    facts += [f"step {example.step}", f"{example.length} tokens"]
    if example.parsed is not None:
        facts.append(f"read as <b>{escape(_cut(example.parsed, 80))}</b>")
    facts.append(f"gold <b>{escape(_cut(example.answer, 80))}</b>")
    line = "".join(f"<span>{fact}</span>" for fact in facts)
    return (
        f"<div class='example' style='--tone: var(--{tone})'><div class='what'>{line}</div>"
        f"<h4>prompt</h4><pre>{escape(_cut(example.prompt, MAX_TEXT))}</pre>"
        f"<h4>response</h4><pre>{escape(_cut(example.text, MAX_TEXT))}</pre></div>"
    )


def _others(run: Run, shown: Sequence[Panel]) -> str:
    panels = other_panels(run, shown)
    figures = _figures("", panels).replace("<h2></h2>", "")
    return f"<details><summary>Other metrics ({len(panels)})</summary>{figures}</details>" if panels else ""


def _config(run: Run) -> str:
    if not run.config:
        return ""
    text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    return f"<details><summary>All settings</summary><pre>{escape(text)}</pre></details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already; the head is plain text."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='box'><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _named(name: str, tone: str) -> str:
    return f"<span class='dot' style='--tone: var(--{tone})'></span>{escape(label_of(name))}"


def _tone(kind: str) -> str:
    return KIND_COLOURS.get(kind, SPARE_COLOURS[0])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} … ({len(text) - length:,} more characters)"
