"""Colours and styles, shared by the picture and the page.

A drawing uses the light colours. On the page each of them becomes a CSS variable, which has a dark value too.
"""

from __future__ import annotations

LIGHT = {
    "surface": "#fcfcfb",
    "ink": "#0b0b0b",
    "soft": "#52514e",
    "muted": "#898781",
    "grid": "#e1e0d9",
    "blue": "#2a78d6",
    "orange": "#eb6834",
    "aqua": "#1baf7a",
    "violet": "#4a3aa7",
    "yellow": "#eda100",
    "magenta": "#e87ba4",
    "red": "#e34948",
    "green": "#008300",
    "steel": "#6f8fb0",
    "before": "#b9b7ae",
}
DARK = LIGHT | {
    "surface": "#1a1a19",
    "ink": "#ffffff",
    "soft": "#c3c2b7",
    "muted": "#898782",
    "grid": "#2c2c2a",
    "blue": "#3987e5",
    "orange": "#d95926",
    "aqua": "#199e70",
    "violet": "#9085e9",
    "yellow": "#c98500",
    "magenta": "#d55181",
    "red": "#e66767",
    "green": "#2f9e3a",
    "before": "#63625c",
}

KIND_COLOURS = {"solve": "blue", "judge_one": "orange", "judge_pair": "aqua", "reflect": "violet"}
COMPONENT_COLOURS = {"policy": "blue", "pointwise": "orange", "pairwise": "aqua", "reflection": "violet", "kl": "muted"}
PHASE_COLOURS = {
    "rollout": "yellow",
    "score": "magenta",
    "recycle": "red",
    "logprobs": "aqua",
    "update": "green",
    "handoff": "violet",
    "eval": "steel",
    "other": "before",
}
SPARE_COLOURS = ("steel", "yellow", "magenta", "red", "green")


def colour(name: str) -> str:
    """The light hex value of a colour name."""
    return LIGHT[name]


def label_of(name: str) -> str:
    """A name as one reads it: ``judge_one`` -> ``judge one``."""
    return name.replace("_", " ").replace("/", " ")


def with_variables(svg: str) -> str:
    """An SVG drawn in the light colours, with each of them as a CSS variable."""
    for name, value in LIGHT.items():
        svg = svg.replace(value, f"var(--{name})")
    return svg


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


_PAGE_LIGHT = LIGHT | {"card": "#ffffff", "line": "#e6e5df", "good": "#006300", "bad": "#b3261e"}
_PAGE_DARK = DARK | {"card": "#222221", "line": "#353532", "good": "#5fc46a", "bad": "#f08a85"}

_RULES = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 28px 24px 64px; background: var(--surface); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 0; }
.lead, .note, figcaption p { color: var(--soft); }
.note, figcaption p { font-size: 13px; }
.missing { margin-top: 20px; border-left: 4px solid var(--yellow); background: var(--card); padding: 10px 16px; }
.missing ul { margin: 4px 0 0; padding-left: 20px; color: var(--soft); font-size: 14px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin-top: 22px; }
.tile, figure, .example, .box { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 12px 16px 14px; border-top: 3px solid var(--tone); }
.tile b { display: block; font-size: 30px; line-height: 1.25; font-weight: 600; }
.tile span { color: var(--soft); font-size: 13px; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 6px; }
figure svg { display: block; width: 100%; height: auto; margin-top: 6px; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif !important; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); gap: 0 28px; }
.box { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 7px 14px; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: 13px; }
th:first-child, td:first-child { text-align: left; font-weight: 500; }
table.facts td { white-space: normal; overflow-wrap: anywhere; text-align: left; }
table.facts th { font-weight: 500; color: var(--soft); }
td small { color: var(--soft); font-size: 12.5px; margin-left: 6px; }
.up { color: var(--good); } .down { color: var(--bad); }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; background: var(--tone); margin-right: 8px; }
.examples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); gap: 14px;
  align-items: start; margin-top: 10px; }
.example { padding: 12px 16px 14px; border-left: 3px solid var(--tone); min-width: 0; }
.example .what { font-size: 13px; color: var(--soft); display: flex; flex-wrap: wrap; gap: 2px 14px; }
.example .what b { color: var(--ink); }
.example h4 { margin: 10px 0 2px; font-size: 12.5px; font-weight: 500; color: var(--soft); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 260px; overflow-y: auto; padding: 8px 10px;
  background: var(--surface); border: 1px solid var(--line); border-radius: 5px;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin-top: 14px; } summary { cursor: pointer; font-weight: 500; } details > * + * { margin-top: 10px; }
details pre { max-height: none; }
"""
CSS = f"""
:root {{ color-scheme: light dark; {_variables(_PAGE_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_PAGE_DARK)} }} }}
{_RULES}"""
