"""The closure that the lock file holds."""

from __future__ import annotations

import re
from pathlib import Path

from tools.lock import LEFT_OUT, closure, direct_requirements, normal, render

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"

CHOSEN = {
    "app": {"name": "app", "version": "1.0", "requires_dist": ["Server[fast]>=2", "triton", 'old; python_version<"3"']},
    "server": {"name": "Server", "version": "2.1", "requires_dist": ['speed-up; extra=="fast"', 'slow; extra=="slow"']},
    "speed-up": {"name": "speed_up", "version": "3.0", "requires_dist": ["app"]},
    "triton": {"name": "triton", "version": "3.9", "requires_dist": ["only-for-triton"]},
}


def test_closure_follows_extras_and_markers_and_stops_at_what_is_left_out() -> None:
    assert closure(direct_requirements("app  # why\n\n# nothing\n"), CHOSEN) == {"app", "server", "speed-up"}


def test_render_pins_exactly_and_gives_the_reasons() -> None:
    text = render(["server", "app"], CHOSEN)
    assert [line for line in text.splitlines() if not line.startswith("#")] == ["app==1.0", "server==2.1"]
    assert all(f"# {name} is left out: {reason}." in text for name, reason in LEFT_OUT.items())


def test_the_lock_file_covers_what_the_project_asks_for() -> None:
    lines = (REQUIREMENTS / "cpu.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[\w.+!]+", version) for version in pins.values())
    assert not set(LEFT_OUT) & set(pins)
    for requirement in direct_requirements((REQUIREMENTS / "cpu.in").read_text()):
        assert requirement.specifier.contains(pins[normal(requirement.name)], prereleases=True)
