"""spark-plan: study the hand-over of weights between layouts without any of their ranks."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from yaml import YAMLError

from spark_megatron.architecture import Architecture, Layout
from spark_megatron.config import described
from spark_megatron.engine.weights.table import elements, table
from spark_megatron.hybrid.plan import Ranks, Sides, plan
from spark_megatron.hybrid.traffic import BETWEEN, FORWARDED, INSIDE, Traffic, traffic
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.schema import ConfigError, build

_DEFAULTS = Path(__file__).with_name("reshard.yaml")
_ITEMSIZE = {"bf16": 2, "fp32": 4}
_GB = 1e9

_PURPOSE = """\
spark-plan reshard: what it takes to hand a model's weights from a training layout to vLLM's. Nothing is started.

usage: spark-plan reshard model=... ranks=... [name=value ...]

  spark-plan reshard model=models/llama ranks=1024 tensor=8 pipeline=16 sampler_tensor=8

settings and their values where none are given:"""


@dataclass(frozen=True)
class Settings:
    """What ``reshard.yaml`` says, and the command line."""

    model: str
    ranks: int
    node: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    sampler_tensor: int
    dtype: Literal["bf16", "fp32"]
    bucket_mb: float
    inside_gb_s: float
    between_gb_s: float

    @property
    def layout(self) -> Layout:
        """Sequence parallelism moves no weights: it is on where it can be, as experts need it."""
        return Layout(self.tensor, self.pipeline, self.context, self.expert, self.virtual, sequence=self.tensor > 1)


def main() -> None:
    """Entry point of the console script."""
    try:
        _obey(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"spark-plan: {error}")


def _obey(arguments: list[str]) -> None:
    if not arguments or {"--help", "-h"} & set(arguments):
        print(usage())
        return
    command, *overrides = arguments
    if command != "reshard":
        raise ConfigError(f"{command} is no command; there is reshard: spark-plan reshard name=value ...")
    settings = read(overrides)
    begun = time.perf_counter()
    sides = sides_of(settings)
    found = traffic(sides, plan(sides, int(settings.bucket_mb * 2**20)))
    show(settings, sides, found, time.perf_counter() - begun)


def usage() -> str:
    """Purpose, example, and all settings."""
    lines = _DEFAULTS.read_text(encoding="utf-8").splitlines()
    return "\n".join([_PURPOSE, *(f"  {line}" for line in lines)])


def read(overrides: list[str]) -> Settings:
    """The settings of a command line.

    Raises:
        ConfigError: an argument that names no setting, or a value out of range.
    """
    for override in overrides:
        if override.startswith("-") or "=" not in override:
            raise ConfigError(f"{override} cannot be read: there is the option --help, all else is written name=value")
    try:
        given = OmegaConf.merge(OmegaConf.load(_DEFAULTS), OmegaConf.from_dotlist(overrides))
    except YAMLError as error:
        raise ConfigError(f"{' '.join(overrides)} cannot be read: write name=value") from error
    values: Any = OmegaConf.to_container(given)
    settings: Settings = build({name: value for name, value in values.items() if value is not None}, Settings)
    for name, value in vars(settings).items():
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value} must be a finite number greater than 0")
    return settings


def sides_of(settings: Settings) -> Sides:
    """Both layouts with their tables.

    Raises:
        ConfigError: no such model, or a layout that does not fit it or the ranks.
    """
    path = Path(settings.model)
    model, _ = described(f"model={path}", path if path.is_file() else path / "config.json")
    try:
        layout = settings.layout
        layout.data(settings.ranks)
        model.check(layout)
    except ValueError as error:
        raise ConfigError(str(error).replace("parallel.", "")) from error
    _check_sampler(settings, model)
    rows, degree = table(model, fused=False), settings.sampler_tensor
    itemsize = _ITEMSIZE[settings.dtype]
    return Sides(model, layout, rows, degree, vllm_rows(model), settings.ranks, settings.node, itemsize)


def _check_sampler(settings: Settings, model: Architecture) -> None:
    degree = settings.sampler_tensor
    if settings.ranks % degree:
        raise ConfigError(f"sampler_tensor={degree} does not divide ranks={settings.ranks}: choose a degree that does")
    try:
        model.check(Layout(tensor=degree, sequence=degree > 1))
    except ValueError as error:
        raise ConfigError(str(error).replace("parallel.tensor", "sampler_tensor")) from error


def show(settings: Settings, sides: Sides, found: Traffic, seconds: float) -> None:
    """Print what a person wants to know of a plan that took ``seconds`` to make."""
    console = Console(highlight=False)
    _say_sides(console, settings, sides)
    console.print(_volumes(found))
    sent = found.sent.sum(0)
    busiest = found.busiest_sender
    times_mean = f" ({sent[busiest] / sent.mean():.3f} x the mean)" if sent.any() else ""
    console.print(f" busiest sender  rank {busiest}, {_size(sent[busiest])}{times_mean}")
    console.print(f" predicted time  {_predicted(settings, found)}")
    console.print(f" the plan        {found.parcels:,} parcels, made in {seconds:.2f} s")


def _say_sides(console: Console, settings: Settings, sides: Sides) -> None:
    count = elements(sides.rows)
    nodes = -(-sides.world // sides.node)
    where = f"{sides.world:,} ranks on {nodes:,} node{'s' * (nodes > 1)}"
    console.print(
        f" {sides.model.family} with {count / 1e9:.3g} billion weights, {_size(count * sides.itemsize)} in "
        f"{settings.dtype}, on {where}"
    )
    degrees = {name: getattr(settings, name) for name in ("tensor", "pipeline", "virtual", "context", "expert")}
    shown = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name == "tensor"]
    samplers = sides.world // sides.tensor_parallel
    console.print(f" trainer  {' x '.join([*shown, f'data {sides.layout.data(sides.world)}'])}")
    console.print(f" vLLM     tensor {sides.tensor_parallel} x data {samplers}")


def _volumes(found: Traffic) -> Table:
    """What ranks and nodes send, receive and keep."""
    made = Table(box=None, padding=(0, 3, 0, 1), pad_edge=False)
    for title in ("", "least", "mean", "most", "bound, mean", "ratio"):
        made.add_column(title, justify="right" if title else "left", header_style="bold", no_wrap=True)
    _add(made, "a rank receives", found.received.sum(0), found.bound)
    _add(made, "a rank sends", found.sent.sum(0))
    _add(made, "a rank keeps", found.kept)
    _add(made, "into a node", found.into_node, found.node_bound)
    _add(made, "out of a node", found.out_of_node)
    return made


def _add(to: Table, title: str, volume: Ranks, bound: Ranks | None = None) -> None:
    cells = [_size(value) for value in (volume.min(), volume.mean(), volume.max())]
    if bound is not None:
        cells += [_size(bound.mean()), f"{volume.sum() / bound.sum():.3f}" if bound.any() else "nothing to move"]
    to.add_row(title, *cells)


def _size(count: float | np.number[Any]) -> str:
    """Bytes in decimal units, as link speeds are given."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def _predicted(settings: Settings, found: Traffic) -> str:
    inside, between = settings.inside_gb_s * _GB, settings.between_gb_s * _GB
    ways = found.seconds(inside, between)
    at_once = f"{_time(ways[BETWEEN])} between nodes beside {_time(ways[INSIDE])} within"
    return f"{_time(found.predicted(inside, between))}: {at_once}, then {_time(ways[FORWARDED])} to forward"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.0f} us"


if __name__ == "__main__":
    main()
