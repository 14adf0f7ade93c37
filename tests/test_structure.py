"""The shape of the code: who may import whom, what an import may do, and how large things may get."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from spark_megatron.paths import conf_dir

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spark_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))

BASE = {"types", "schema", "config", "checks", "runtime", "paths", "architecture", "slices"}
SIDE_BY_SIDE = {"data", "algos", "recycle", "rewards", "tracking"}
LAYERS = [BASE, SIDE_BY_SIDE, {"engine", "rollout"}, {"hybrid", "eval", "report"}, {"trainers"}, {"cli"}]
"""From the bottom to the top. A package may import those of lower layers, and none of its own layer ..."""
ALSO = {
    ("checks", "config"),
    ("checks", "schema"),
    ("checks", "architecture"),
    ("config", "types"),
    ("config", "architecture"),
    ("data", "recycle"),
    ("data", "rewards"),
    ("recycle", "rewards"),
}
"""... but for these ..."""
NEVER = {("eval", "engine")}
"""... and never those."""

PURE = ("algos", "recycle", "rewards", "data")
HEAVY = ("megatron", "vllm", "hydra", "wandb", "torch.distributed")
OWNERS = {
    "megatron": ("engine/",),
    "vllm": ("rollout/",),
    "wandb": ("tracking/",),
    "hydra": ("cli/", "trainers/parts.py", "trainers/run.py"),
}
"""The only places that may import a library."""


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(file: Path) -> Iterator[str]:
    """Full names of everything a file imports, at its top or inside of a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str | None:
    """The sub-package (or the single module beside them) that a module of ours belongs to."""
    names = module.split(".")
    return names[1] if names[0] == "spark_megatron" and len(names) > 1 else None


def allowed(importer: str, imported: str) -> bool:
    level = {part: index for index, layer in enumerate(LAYERS) for part in layer}
    if importer == imported or (importer, imported) in ALSO:
        return True
    return level[imported] < level[importer] and (importer, imported) not in NEVER


def test_every_part_has_its_place() -> None:
    parts = {part for part in map(part_of, map(name_of, FILES)) if part is not None}
    assert parts == set.union(*LAYERS)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_dependencies_point_downwards(file: Path) -> None:
    part = part_of(name_of(file))
    others = {other for other in map(part_of, imports(file)) if other is not None}
    assert not {other for other in others if part is None or not allowed(part, other)}


@pytest.mark.parametrize(
    ("importer", "imported", "answer"),
    [
        ("cli", "engine", True),
        ("trainers", "hybrid", True),
        ("hybrid", "engine", True),
        ("hybrid", "rollout", True),
        ("eval", "rollout", True),
        ("eval", "engine", False),
        ("engine", "rollout", False),
        ("rollout", "engine", False),
        ("engine", "hybrid", False),
        ("data", "recycle", True),
        ("recycle", "data", False),
        ("rewards", "recycle", False),
        ("algos", "data", False),
        ("tracking", "algos", False),
        ("types", "config", False),
        ("report", "trainers", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, answer: bool) -> None:
    assert allowed(importer, imported) == answer


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_libraries_stay_where_they_belong(file: Path) -> None:
    inside = str(file.relative_to(PACKAGE))
    found = list(imports(file))
    for library, owners in OWNERS.items():
        if any(name.split(".")[0] == library for name in found):
            assert inside.startswith(owners), f"{inside} imports {library}"
    if inside.startswith(tuple(f"{part}/" for part in PURE)):
        assert not [name for name in found for heavy in HEAVY if f"{name}.".startswith(f"{heavy}.")]


def executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, inside of branches and loops too."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            continue
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in ("body", "orelse", "finalbody"):
                yield from executed(getattr(statement, block, []))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_an_import_only_defines(file: Path) -> None:
    for statement in executed(ast.parse(file.read_text()).body):
        if isinstance(statement, ast.Expr):
            # setattr may fill a private object of the module's own, as a definition in a loop.
            filling = ast.unparse(statement).startswith("setattr(_")
            assert filling or isinstance(statement.value, ast.Constant), f"line {statement.lineno}"
        if isinstance(statement, ast.Assign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            assert all(isinstance(target, ast.Name | ast.Tuple) for target in targets), f"line {statement.lineno}"


IMPORT_ALL = """
import os, random, sys, threading
if "data" in sys.argv[3].split():
    import reasoning_gym  # draws from the global generator when it is imported: not our doing
before = dict(os.environ), random.getstate(), threading.active_count()
for name in sys.argv[1].split():
    __import__(name)
assert (dict(os.environ), random.getstate(), threading.active_count()) == before
print(*sorted(name for name in sys.modules if name.partition(".")[0] in sys.argv[2].split()))
"""


@pytest.mark.parametrize(
    ("parts", "libraries"),
    [
        (PURE, "megatron vllm hydra wandb transformers"),
        (("recycle", "rewards"), "torch megatron vllm hydra wandb transformers"),
    ],
)
def test_pure_modules_are_light(tmp_path: Path, parts: tuple[str, ...], libraries: str) -> None:
    """Importing all of them loads none of the heavy libraries, prints, writes and changes nothing."""
    modules = [name_of(file) for file in FILES if part_of(name_of(file)) in parts]
    assert len(modules) > 10
    command = [sys.executable, "-W", "ignore::SyntaxWarning", "-c", IMPORT_ALL]
    done = subprocess.run(
        [*command, " ".join(modules), libraries, " ".join(parts)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_and_functions_stay_small(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= 80, node.name


def targets(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets(value)
    elif isinstance(node, list):
        for item in node:
            yield from targets(item)


TARGETS = sorted({t for file in conf_dir().rglob("*.yaml") for t in targets(yaml.safe_load(file.read_text()))})


@pytest.mark.parametrize("target", TARGETS)
def test_the_settings_name_what_exists(target: str) -> None:
    module, _, attribute = target.rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_tests_mirror_the_package() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= packages | {"tools"}


def test_every_test_file_is_collected_by_its_name() -> None:
    """A file with tests that pytest does not find would be silent."""
    for file in (ROOT / "tests").rglob("*.py"):
        has_tests = any(
            isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            for node in ast.parse(file.read_text()).body
        )
        assert has_tests == file.name.startswith("test_"), file


def test_no_drawer_for_odds_and_ends() -> None:
    names = {file.stem for folder in ("spark_megatron", "tests", "tools") for file in (ROOT / folder).rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "common", "misc"}
