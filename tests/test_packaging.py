"""A wheel carries every settings and template file, and finds its settings once installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spark_megatron.paths import conf_dir

ROOT = Path(__file__).resolve().parent.parent


def yaml_files(folder: Path) -> set[str]:
    """Paths of all yaml files below ``folder``, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel of this checkout was installed."""
    base = tmp_path_factory.mktemp("packaging")
    checkout, wheels, target = base / "checkout", base / "wheels", base / "target"
    for folder in ("spark_megatron", "conf"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-index", "--no-deps"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), str(checkout)]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("spark_megatron-*.whl")
    subprocess.run([*pip, "install", *offline, "--target", str(target), str(wheel)], check=True)
    return target


def test_a_checkout_finds_its_settings() -> None:
    assert conf_dir() == ROOT / "conf"


def test_an_installed_wheel_finds_its_own_settings(installed: Path) -> None:
    # -S hides this environment's packages: only the wheel can be imported
    code = "from spark_megatron.paths import conf_dir; print(conf_dir())"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=installed, text=True, capture_output=True, check=True)
    assert Path(done.stdout.strip()) == installed / "spark_megatron" / "conf"


def test_the_wheel_has_all_settings_and_templates(installed: Path) -> None:
    assert yaml_files(installed / "spark_megatron" / "conf") == yaml_files(ROOT / "conf")
    in_package = {name for name in yaml_files(installed / "spark_megatron") if not name.startswith("conf/")}
    assert in_package == yaml_files(ROOT / "spark_megatron")


def test_the_wheel_offers_the_commands(installed: Path) -> None:
    (entry_points,) = installed.glob("spark_megatron-*.dist-info/entry_points.txt")
    assert "spark-train = spark_megatron.cli.train:main" in entry_points.read_text()
    assert "spark-eval = spark_megatron.cli.eval:main" in entry_points.read_text()
    assert "spark-report = spark_megatron.cli.report:main" in entry_points.read_text()
    assert "spark-plan = spark_megatron.cli.plan:main" in entry_points.read_text()


def test_missing_settings_are_named(tmp_path: Path) -> None:
    package = tmp_path / "spark_megatron"
    package.mkdir()
    for name in ("__init__.py", "paths.py"):
        shutil.copy(ROOT / "spark_megatron" / name, package)
    code = "from spark_megatron.paths import conf_dir; conf_dir()"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode != 0
    assert str(package / "conf" / "config.yaml") in done.stderr.splitlines()[-1]
