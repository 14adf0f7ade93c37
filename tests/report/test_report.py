"""The report as a whole: files that open, pages that hold together, and honesty about what is missing."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import pytest

from spark_megatron.report.load import load_run
from spark_megatron.report.page import render_page
from spark_megatron.report.report import Report, describe, make_report

Edit = Callable[[Path, Callable[[Any], Any]], None]
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced and gathers the visible text, the tags and every address."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.pieces: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [v or "" for k, v in attributes if k in ("href", "src", "srcset", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.pieces))


def page_of(directory: Path) -> tuple[Page, str]:
    run = load_run(directory)
    html = render_page(run, describe(run))
    return Page(html), html


def test_a_whole_run(whole: Report) -> None:
    assert whole.missing == ()
    assert (whole.picture.name, whole.page.name) == ("report.png", "report.html")
    height, width, _ = matplotlib.image.imread(whole.picture).shape
    assert width > 1500
    assert height > 1000
    page = Page(whole.page.read_text())
    for words in (
        "75.0 % held out, was 25.0 %",
        "25.0 % [15.0, 35.0]",
        "+50.0 [+35.9, +64.1]",  # 10 / sqrt(50) per side: two distances of 0.1 to the bounds
        "models/tiny · ranks 2, tensor 2 · seed 17 · 12 of 60 steps · 48 s",
        "Layout ranks 2, tensor 2",
        "rollout 2.00 s 50.0 % 24 s",
        "180 93.8 % 12 6.2 %",
        "right judge_pair 12",
        "judge_pair <question> & so on",
    ):
        assert words in page.text
    assert "partial" not in page.text


def test_the_page_asks_nobody_for_anything(whole: Report) -> None:
    html = whole.page.read_text()
    page = Page(html)
    assert all(address.startswith("#") for address in page.addresses)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert "@import" not in html
    assert "default-src 'none'" in html
    without_namespaces = re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", html)
    assert "http://" not in without_namespaces
    assert "https://" not in without_namespaces


def test_what_a_model_wrote_cannot_act(whole: Report) -> None:
    html = whole.page.read_text()
    page = Page(html)
    assert "<script>alert" not in html
    assert "<script>alert(1)</script>" in page.text


def test_both_colour_schemes_have_every_colour(whole: Report) -> None:
    html = whole.page.read_text()
    used = set(re.findall(r"var\(--([a-z]+)\)", html)) - {"tone"}
    light, dark = (set(re.findall(r"--([a-z]+): #", part)) for part in html.split("prefers-color-scheme: dark")[:2])
    assert used <= light
    assert used <= dark
    # No drawing keeps a colour of its own, which one of the two schemes could not show.
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.S):
        assert not re.findall(r"#[0-9a-f]{6}\b(?!\w)", re.sub(r"(url\(|href=\")#\w+", "", svg))
        ElementTree.fromstring(svg)


def test_without_an_after_the_table_says_so(run_directory: Path, edit_json: Edit) -> None:
    edit_json(run_directory / "eval.json", lambda stored: {"before": stored["before"]})
    page, _ = page_of(run_directory)
    assert "solve 25.0 % [15.0, 35.0] \N{EN DASH} \N{EN DASH} 80" in page.text
    assert "0.60 training reward, began at 0.05" in page.text


def test_a_supervised_run_without_anything_but_metrics(sft_directory: Path) -> None:
    report = make_report(sft_directory)
    page = Page(report.page.read_text())
    assert "Loss" in page.text
    assert "Other metrics (1)" in page.text
    assert "Training reward" not in page.text
    assert "This report is partial." in page.text
    assert len(report.missing) == 3
    assert all(words in page.text for words in report.missing)


def test_an_empty_directory(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    assert len(report.missing) == 4
    assert report.picture.stat().st_size > 1000
    Page(report.page.read_text())


def test_a_single_step(run_directory: Path) -> None:
    first = (run_directory / "metrics.jsonl").read_text().splitlines()[0]
    (run_directory / "metrics.jsonl").write_text(first + "\n")
    page, _ = page_of(run_directory)
    assert "1 of 60 steps" in page.text


def test_names_with_special_characters(tmp_path: Path) -> None:
    directory = tmp_path / "a <b> & $x$"
    directory.mkdir()
    row = {"step": 1, "time": 1.0, "policy/kl": 0.1, "weights/<i>$\\frac$": 0.5, "odd/<b>": 1.0}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page, html = page_of(directory)
    assert "a <b> & $x$" in page.text
    assert "<i>" not in html


def test_into_another_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    report = make_report(tmp_path / "run", tmp_path / "elsewhere")
    assert {report.picture, report.page} == set((tmp_path / "elsewhere").iterdir())
    assert list((tmp_path / "run").iterdir()) == []


def test_a_missing_directory_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no run directory"):
        make_report(tmp_path / "nowhere")
