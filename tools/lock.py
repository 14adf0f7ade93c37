"""Write requirements/cpu.lock: resolve requirements/cpu.in with pip and pin everything that is truly needed.

    python tools/lock.py [options for pip install, such as --extra-index-url URL]

pip resolves without installing anything. The lock holds what can be reached from cpu.in without passing through the
packages in ``LEFT_OUT``, which is why it has to be installed with ``pip install --no-deps -r requirements/cpu.lock``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:  # an interpreter without any packages still has the copy that pip carries
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"

LEFT_OUT: Mapping[str, str] = {
    "torchvision": "its builds do not match the CPU build of torch, and transformers breaks when it is there",
    "torchaudio": "its builds do not match the CPU build of torch",
    "torchcodec": "its builds do not match the CPU build of torch",
    "triton": "one gigabyte that only a GPU can use; vLLM, xgrammar and torch do without it on a CPU",
}


def normal(name: str) -> str:
    """The spelling of a distribution's name that package indexes compare (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_requirements(text: str) -> list[Requirement]:
    """The requirements in a file like cpu.in, where ``#`` starts a comment."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def resolve(source: Path, pip_options: list[str]) -> dict[str, dict[str, Any]]:
    """pip's choice for every package: normal name -> core metadata (``name``, ``version``, ``requires_dist``)."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*command, "-r", str(source), *pip_options], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip could not resolve {source} (see its messages above); nothing was written.")
    chosen = (item["metadata"] for item in json.loads(done.stdout)["install"])
    return {normal(metadata["name"]): metadata for metadata in chosen}


def closure(direct: Iterable[Requirement], chosen: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Normal names of all packages in ``chosen`` that ``direct`` needs here, extras and markers respected."""
    reached: set[tuple[str, str]] = set()
    queue = list(direct)
    while queue:
        requirement = queue.pop()
        name = normal(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if name in LEFT_OUT or (name, extra) in reached:
                continue
            reached.add((name, extra))
            needs = map(Requirement, chosen[name].get("requires_dist") or [])
            queue += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in reached}


def render(names: Iterable[str], chosen: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of the lock file, one pin per line, sorted by name."""
    header = "# Made by tools/lock.py from cpu.in (Linux x86-64, Python 3.11); use pip install --no-deps -r.\n"
    left_out = "".join(f"# {name} is left out: {reason}.\n" for name, reason in LEFT_OUT.items())
    return header + left_out + "".join(f"{name}=={chosen[name]['version']}\n" for name in sorted(names))


def main() -> None:
    """Resolve cpu.in and write cpu.lock."""
    source, target = REQUIREMENTS / "cpu.in", REQUIREMENTS / "cpu.lock"
    chosen = resolve(source, sys.argv[1:])
    names = closure(direct_requirements(source.read_text()), chosen)
    target.write_text(render(names, chosen))
    print(f"{target}: {len(names)} packages; left out: {', '.join(sorted(set(chosen) - names))}")


if __name__ == "__main__":
    main()
