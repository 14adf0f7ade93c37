"""The set-up script: what it demands, in which order it looks for torch, and when it makes the environment anew.

Most tests give it a stand-in for the interpreter, whose ``pip`` notes its arguments and fails where the test says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LOCK = "pip==9.9\nsetuptools==8.8\ntorch==2.2.2+cpu\n"

STAND_IN = """#!/bin/sh
if [ "$2" = venv ]; then
  mkdir -p "$3/bin"
  cp "$0" "$3/bin/python"
elif [ "$2" = pip ]; then
  echo "$*" >> pip_calls
  if [ -n "${REAL_PIP:-}" ]; then exec "$REAL_PYTHON" "$@"; fi
  case "$*" in $PIP_FAILS_ON) echo "ERROR: pip's own words"; exit 1;; esac
else
  exec "$REAL_PYTHON" "$@"
fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the set-up script, a short lock file and the stand-in interpreter."""
    for folder in ("examples", "requirements"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "examples" / "setup.sh", tmp_path / "examples")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "requirements" / "cpu.lock").write_text(LOCK)
    stand_in = tmp_path / "stand_in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return tmp_path


def set_up(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the stand-in interpreter, unless ``PYTHON`` says otherwise."""
    defaults = {"PYTHON": str(checkout / "stand_in"), "REAL_PYTHON": sys.executable, "PIP_FAILS_ON": "nothing"}
    command = ["bash", str(checkout / "examples" / "setup.sh")]
    env = {**os.environ, **defaults, **environment}
    return subprocess.run(command, env=env, text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL)


def pip_calls(checkout: Path) -> list[str]:
    """What pip was asked, one call a line."""
    calls = checkout / "pip_calls"
    return calls.read_text().splitlines() if calls.exists() else []


def stopped_with(done: subprocess.CompletedProcess[str]) -> str:
    """The sentence that a failed set-up ends with."""
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Set-up stopped: ")
    assert last.endswith(".")
    return last


def test_all_is_installed_without_dependency_resolution(checkout: Path) -> None:
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    calls = pip_calls(checkout)
    assert [call.split("--no-build-isolation ")[1] for call in calls] == [
        "pip==9.9 setuptools==8.8",
        "--no-compile torch==2.2.2+cpu",
        "--no-compile -r requirements/cpu.lock",
        "-e .",
    ]
    assert all(" --no-deps " in call for call in calls)
    assert "minutes" in done.stdout.splitlines()[0]
    assert len(done.stdout.splitlines()) == 5
    assert done.stderr == ""


def test_a_second_run_does_nothing(checkout: Path) -> None:
    set_up(checkout)
    before = pip_calls(checkout)
    assert set_up(checkout).stdout == ""
    assert pip_calls(checkout) == before


@pytest.mark.parametrize("changed", ["setup.py", "requirements/cpu.lock"])
def test_changed_requirements_make_the_environment_anew(checkout: Path, changed: str) -> None:
    set_up(checkout)
    with (checkout / changed).open("a") as file:
        file.write("# changed\n")
    (checkout / ".venv" / "leftover").touch()
    assert set_up(checkout).returncode == 0
    assert len(pip_calls(checkout)) == 8
    assert not (checkout / ".venv" / "leftover").exists()


def test_a_half_made_environment_is_made_anew(checkout: Path) -> None:
    stopped_with(set_up(checkout, PIP_FAILS_ON="*-r*"))
    (checkout / ".venv" / "leftover").touch()
    assert set_up(checkout).returncode == 0
    assert not (checkout / ".venv" / "leftover").exists()


def test_an_environment_whose_interpreter_is_gone_is_made_anew(checkout: Path) -> None:
    set_up(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    assert set_up(checkout).returncode == 0
    assert len(pip_calls(checkout)) == 8


def test_a_moved_checkout_is_made_anew(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    set_up(checkout)
    moved = checkout.rename(tmp_path_factory.mktemp("moved") / "checkout")
    assert set_up(moved).returncode == 0
    assert len(pip_calls(moved)) == 8


def test_torch_comes_from_its_own_index_only_when_the_configured_ones_fail(checkout: Path) -> None:
    done = set_up(checkout, PIP_FAILS_ON="*--no-compile torch*")
    assert done.returncode == 0, done.stderr
    torch_calls = [call for call in pip_calls(checkout) if "torch==" in call]
    assert [TORCH_INDEX in call for call in torch_calls] == [False, True]


def test_torch_found_nowhere_names_its_index(checkout: Path) -> None:
    done = set_up(checkout, PIP_FAILS_ON="*torch==*")
    assert TORCH_INDEX in stopped_with(done)
    assert "ERROR: pip's own words" in done.stderr


def test_a_package_that_fails_shows_what_pip_said(checkout: Path) -> None:
    done = set_up(checkout, PIP_FAILS_ON="*cpu.lock*")
    assert "requirements/cpu.lock" in stopped_with(done)
    assert "ERROR: pip's own words" in done.stderr


def test_an_unreachable_index_ends_with_what_to_do(checkout: Path) -> None:
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_RETRIES": "0", "PIP_DRY_RUN": "1"}
    done = set_up(checkout, REAL_PIP="yes", PIP_INDEX_URL="http://127.0.0.1:9/simple", **alone)
    assert "PIP_INDEX_URL" in stopped_with(done)
    assert "No matching distribution found for pip==9.9" in done.stderr


@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_a_wrong_python_ends_with_what_to_do(checkout: Path, python: str) -> None:
    assert "install it, or name it with PYTHON=" in stopped_with(set_up(checkout, PYTHON=python))
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("name", ["python3.11", "python3"])
def test_python_is_found_under_either_name(checkout: Path, name: str) -> None:
    tools = checkout / "tools"
    tools.mkdir()
    needed = ("bash", "dirname", "cat", "sha256sum", "flock", "rm", "mkdir", "cp", "grep", "tail", "sh")
    for tool in needed:
        (tools / tool).symlink_to(shutil.which(tool) or "/missing")
    (checkout / "stand_in").rename(tools / name)
    done = set_up(checkout, PYTHON="", CC="sh", PATH=str(tools))
    assert done.returncode == 0, done.stderr


def test_a_missing_compiler_ends_with_what_to_do(checkout: Path) -> None:
    done = set_up(checkout, CC="/nowhere/cc -O2")
    assert "a C compiler (/nowhere/cc)" in stopped_with(done)
    assert not (checkout / ".venv").exists()
