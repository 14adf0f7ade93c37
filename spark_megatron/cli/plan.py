"""spark-plan: study the hand-over of weights between layouts without any of their ranks."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from yaml import YAMLError

from spark_megatron.architecture import Architecture, Layout
from spark_megatron.checks import described
from spark_megatron.engine.weights.table import elements, table
from spark_megatron.hybrid.plan import Ranks, Sides, plan
from spark_megatron.hybrid.traffic import BETWEEN, FORWARDED, INSIDE, Traffic, traffic
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.schema import ConfigError, build

_DEFAULTS = Path(__file__).with_name("reshard.yaml")
_ITEMSIZE = {"bf16": 2, "fp32": 4}
_TITLE = 16

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
    console = Console(highlight=False, soft_wrap=True)
    for title, text in _facts(settings, sides).items():
        console.print(f" [bold]{title:{_TITLE}}[/bold]{text}")
    console.print(_volumes(found), soft_wrap=False)
    for title, text in _findings(settings, found, seconds).items():
        console.print(f" [bold]{title:{_TITLE}}[/bold]{text}")


def _facts(settings: Settings, sides: Sides) -> dict[str, str]:
    """What was asked about."""
    count, nodes = elements(sides.rows), -(-sides.world // sides.node)
    names = ("tensor", "pipeline", "virtual", "context", "expert")
    degrees = [f"{name} {getattr(settings, name)}" for name in names if getattr(settings, name) > 1]
    trainer = " x ".join([*degrees, f"data {sides.layout.data(sides.world)}"])
    return {
        "model": f"{sides.model.family}, {_scaled(count)} weights, {_size(count * sides.itemsize)} in {settings.dtype}",
        "ranks": f"{sides.world:,} on {nodes:,} node{'s' * (nodes > 1)}",
        "trainer": trainer,
        "vLLM": f"tensor {sides.tensor_parallel} x data {sides.world // sides.tensor_parallel}",
    }


def _volumes(found: Traffic) -> Table:
    """What ranks and nodes send, receive and keep."""
    made = Table(box=SIMPLE, padding=(0, 1, 0, 1), pad_edge=False, header_style="bold")
    made.add_column("", min_width=_TITLE, style="bold", no_wrap=True)
    for title in ("least", "mean", "most", "bound (mean)", "ratio"):
        made.add_column(title, justify="right", min_width=9, no_wrap=True)
    _add(made, "a rank receives", found.received.sum(0), found.bound)
    _add(made, "a rank sends", found.sent.sum(0))
    _add(made, "a rank keeps", found.kept)
    _add(made, "into a node", found.into_node, found.node_bound)
    _add(made, "out of a node", found.out_of_node)
    return made


def _add(to: Table, title: str, volume: Ranks, bound: Ranks | None = None) -> None:
    cells = [_size(value) for value in (volume.min(), volume.mean(), volume.max())]
    if bound is not None:
        cells += [_size(bound.mean()), f"{volume.sum() / bound.sum():.3f}" if bound.any() else "-"]
    to.add_row(title, *cells)


def _findings(settings: Settings, found: Traffic, seconds: float) -> dict[str, str]:
    """What else came out."""
    sent, busiest = found.sent.sum(0), found.busiest_sender
    inside, between = settings.inside_gb_s * 1e9, settings.between_gb_s * 1e9
    ways = [_time(way) for way in found.seconds(inside, between)]
    return {
        "busiest sender": f"rank {busiest}, {sent[busiest] / sent.mean():.3f} x the mean" if sent.any() else "none",
        "predicted time": f"{_time(found.predicted(inside, between))} ({ways[BETWEEN]} between nodes, meanwhile "
        f"{ways[INSIDE]} inside them, then {ways[FORWARDED]} to forward)",
        "the plan": f"{found.parcels:,} parcels, made in {seconds:.2f} s",
    }


def _scaled(count: float) -> str:
    """A number with at most a letter for its power of 1000."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {letter}"
    return f"{count:.0f} "


def _size(count: float) -> str:
    """Bytes in decimal units, as speeds of links are given."""
    return f"{_scaled(count)}B"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return "0 s"


if __name__ == "__main__":
    main()
