"""The script for the newest megatron-core: what it demands and what it leaves alone; and what it installs.

A stand-in for the interpreter notes what it is asked for. That the engine's tests pass there is for the script to show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.lock import direct_requirements, normal

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"

STAND_IN = """#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python" ;;
  *"-m pip install"*) echo "${*##*-m }" >> asked; echo "ERROR: pip's own words"; exit "${PIP_ANSWERS:-0}" ;;
  *"-m pytest"*) echo "${*##*-m }" >> asked ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, its requirements and the stand-in interpreter."""
    for name in ("tools/newest_megatron.sh", "requirements/newest_megatron.txt"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    stand_in = tmp_path / "stand_in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(checkout / "tools" / "newest_megatron.sh"), *arguments]
    env = {**os.environ, "PYTHON": str(checkout / "stand_in"), **environment}
    return subprocess.run(command, env=env, text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL)


def asked(checkout: Path) -> list[str]:
    return [" ".join(line.split()[:1] + line.split()[-1:]) for line in (checkout / "asked").read_text().splitlines()]


def test_the_environment_is_made_once_and_anew_when_its_packages_change(checkout: Path) -> None:
    install, tests = "pip requirements/newest_megatron.txt", "pytest tests/engine"
    assert run(checkout).returncode == 0
    assert asked(checkout) == [install, tests]
    assert run(checkout, "-x", "tests/engine/test_platform.py").returncode == 0
    assert asked(checkout)[2:] == ["pytest tests/engine/test_platform.py"]
    with (checkout / "requirements" / "newest_megatron.txt").open("a") as file:
        file.write("more==1\n")
    assert run(checkout).returncode == 0
    assert asked(checkout)[3:] == [install, tests]


def test_a_set_up_that_failed_is_told_and_made_anew(checkout: Path) -> None:
    done = run(checkout, PIP_ANSWERS="1", FOLDER="here")
    assert done.returncode == 1
    assert "ERROR: pip's own words" in done.stderr
    assert "Stopped: pip could not install requirements/newest_megatron.txt" in done.stderr
    assert run(checkout, FOLDER="here").returncode == 0
    assert asked(checkout)[-1] == "pytest tests/engine"


def test_another_python_is_refused(checkout: Path) -> None:
    done = run(checkout, PYTHON="/bin/false")
    assert done.returncode == 1
    assert done.stderr == (
        "Stopped: no Python 3.12 among '/bin/false'; install it, or name it with PYTHON=/path/to/python3.12.\n"
    )
    assert not (checkout / ".venv-newest").exists()


def test_a_folder_that_is_no_environment_is_kept(checkout: Path) -> None:
    (checkout / "mine").mkdir()
    (checkout / "mine" / "file").touch()
    done = run(checkout, FOLDER="mine")
    assert done.returncode == 1
    assert done.stderr == "Stopped: mine exists and is no Python environment; name another with FOLDER=.\n"
    assert (checkout / "mine" / "file").exists()


def test_both_environments_have_the_same_versions_but_for_megatron_core() -> None:
    """So that a test that fails in one of them only tells of megatron-core."""
    lines = (REQUIREMENTS / "cpu.lock").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {
        normal(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in direct_requirements((REQUIREMENTS / "newest_megatron.txt").read_text())
    }
    different = {name for name, version in pins.items() if name in locked and locked[name].split("+")[0] != version}
    assert different == {"megatron-core"}
    assert pins["megatron-core"].startswith("0.19.")
    only_here = {name for name in pins if name not in locked}
    assert all(name == "triton" or name.startswith("nvidia-") for name in only_here), "what only CUDA's torch needs"
