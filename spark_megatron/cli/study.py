"""spark-study: train several methods with several seeds; compare them at equal steps and at equal sampled tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from yaml import YAMLError

from spark_megatron import runtime
from spark_megatron.report import study
from spark_megatron.report.study import SKILLS, Outcome
from spark_megatron.report.study_picture import save_study
from spark_megatron.schema import ConfigError, build

_DEFAULTS = Path(__file__).with_name("study.yaml")
_SIGNIFICANT = 0.05
_QUICK_SEEDS = 2
_QUICK = ("trainer.total_steps=15", "optim.warmup_updates=4", "eval.items=200")

_PURPOSE = """\
spark-study: train several methods with several seeds and compare them. A study that was stopped goes on.

usage: spark-study [name=value ...]

  spark-study                                   the whole study: some hours on two cores
  spark-study quick=true out=runs/quick         a first look
  spark-study methods.warm='[kl_schedule=warmup]' methods.reward_only=null seeds=3

settings and their values where none are given:"""


@dataclass(frozen=True)
class Settings:
    """What ``study.yaml`` says, and the command line."""

    out: str
    quick: bool
    seeds: int
    base: tuple[str, ...]
    methods: dict[str, Any]
    baseline: str
    tokens_of: str | None


@dataclass(frozen=True)
class Run:
    """One training of a study."""

    method: str
    seed: int
    directory: Path
    overrides: tuple[str, ...]


def main() -> None:
    """Entry point of the console script."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print("\n".join([_PURPOSE, *(f"  {line}" for line in _DEFAULTS.read_text(encoding="utf-8").splitlines())]))
        return
    try:
        settings = read(sys.argv[1:])
        check(settings)
        conduct(settings)
    except ConfigError as error:
        sys.exit(f"spark-study: {error}")


def read(overrides: Sequence[str]) -> Settings:
    """The settings of a command line.

    Raises:
        ConfigError: an argument that cannot be read or names no setting, or a value that cannot be.
    """
    for override in overrides:
        if override.startswith("-") or "=" not in override:
            raise ConfigError(f"{override} cannot be read: there is the option --help, all else is written name=value")
    try:
        given = OmegaConf.merge(OmegaConf.load(_DEFAULTS), OmegaConf.from_dotlist(list(overrides)))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)} cannot be read: write name=value") from error
    values: Any = OmegaConf.to_container(given)
    if isinstance(values["methods"], dict):
        values["methods"] = {name: changes for name, changes in values["methods"].items() if changes is not None}
    settings: Settings = build(values, Settings)
    if settings.seeds < 1:
        raise ConfigError(f"seeds={settings.seeds} must be at least 1")
    for name in ("baseline", "tokens_of"):
        method = getattr(settings, name)
        if method is not None and method not in settings.methods:
            raise ConfigError(f"{name}={method} is none of the methods {', '.join(settings.methods)}")
    for method, changes in settings.methods.items():
        if not isinstance(changes, list) or not all(isinstance(change, str) for change in changes):
            raise ConfigError(f"methods.{method}={changes}: give a list of settings of spark-train, [] for none")
    return settings


def check(settings: Settings) -> None:
    """Compose the settings of every method.

    Raises:
        ConfigError: some spark-train would refuse them.
    """
    runtime.prepare_environment()
    from spark_megatron.cli.compose import load

    for run in runs(settings, "steps", 1):
        try:
            load([*run.overrides])
        except ConfigError as error:
            raise ConfigError(f"methods.{run.method}: {error}") from error


def runs(settings: Settings, half: str, seeds: int, steps: dict[str, int] | None = None) -> list[Run]:
    """The runs of one half of a study, seed by seed, so that a stopped one has the same seeds of all methods."""
    made = []
    for seed in range(seeds):
        for method, changes in settings.methods.items():
            directory = Path(settings.out) / half / method / f"seed_{seed}"
            more = [*_QUICK] if settings.quick else []
            if steps is not None:
                more.append(f"trainer.total_steps={steps[method]}")
            fixed = (f"seed={seed}", f"run_dir={directory}", f"name={method}")
            made.append(Run(method, seed, directory, (*settings.base, *more, *changes, *fixed)))
    return made


def conduct(settings: Settings) -> None:
    """Train what is not trained yet, and write and show the results after each half."""
    console, seeds = Console(highlight=False), min(_QUICK_SEEDS, settings.seeds) if settings.quick else settings.seeds
    equal_steps = train(runs(settings, "steps", seeds), "equal steps", console)
    results = {"steps": study.summary(equal_steps, settings.baseline)}
    finish(settings, results, console)
    if settings.tokens_of is not None:
        planned = runs(settings, "tokens", seeds, steps_for_tokens(equal_steps, settings.tokens_of))
        # The method that sets the number of tokens has been trained with it already.
        again = [run for run in planned if run.method != settings.tokens_of]
        kept = [outcome for outcome in equal_steps if outcome.method == settings.tokens_of]
        results["tokens"] = study.summary([*train(again, "equal tokens", console), *kept], settings.baseline)
        finish(settings, results, console)


def steps_for_tokens(outcomes: Sequence[Outcome], method: str) -> dict[str, int]:
    """How many steps of each method sample as many tokens as a run of ``method`` did, by the means over seeds."""
    mean = {
        name: {figure: study.estimate([o.figures[figure] for o in outcomes if o.method == name]).mean
               for figure in ("tokens", "steps")}
        for name in {outcome.method for outcome in outcomes}
    }  # fmt: skip
    target = mean[method]["tokens"]
    return {name: max(1, round(of["steps"] * target / of["tokens"])) for name, of in mean.items()}


def train(planned: Sequence[Run], what: str, console: Console) -> list[Outcome]:
    """The outcomes of all runs, those that are finished already included.

    Raises:
        ConfigError: a run failed; it names its log.
    """
    outcomes, spent = [], []
    for number, run in enumerate(planned, 1):
        done = study.is_finished(run.directory)
        if not done:
            begun = time.monotonic()
            _train_one(run)
            spent.append(time.monotonic() - begun)
        outcomes.append(study.read_outcome(run.method, run.seed, run.directory))
        solve, judge = (outcomes[-1].figures[name] for name in ("solve", "judge_one"))
        left = sum(not study.is_finished(other.directory) for other in planned[number:])
        eta = f"eta {left * sum(spent) / len(spent) / 60:.0f} min" if spent and left else ""
        took = "there already" if done else f"{spent[-1]:.0f} s"
        console.print(
            f"{what} {number}/{len(planned)}  {run.method} seed {run.seed}: solve {solve:.3f}, judge {judge:.3f}, "
            f"{took}  {eta}",
            soft_wrap=True,
        )
    return outcomes


def _train_one(run: Run) -> None:
    log = run.directory.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        command = [sys.executable, "-m", "spark_megatron.cli.train", *run.overrides]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise ConfigError(
            f"{run.method} with seed {run.seed} ended with code {code}: see {log}, and start the study again to go on"
        )


def finish(settings: Settings, results: dict[str, Any], console: Console) -> None:
    """Write study.json and study.png, and print a table per half."""
    out = Path(settings.out)
    (out / "study.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    save_study(results, out / "study.png")
    for half, found in results.items():
        console.print(_table(half, found, settings.baseline))
    console.print(f"results in {out / 'study.json'}, picture in {out / 'study.png'}")


def _table(half: str, found: dict[str, dict[str, dict[str, float]]], baseline: str) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=f"equal {half}")
    table.caption = (
        f"per cent, ± 95 % over seeds; *: p < {_SIGNIFICANT} against {baseline} (paired t test);\n"
        "flips: answers that reflecting broke and mended"
    )
    table.add_column("method", no_wrap=True)
    for name in (*(skill.replace("_", " ") for skill in SKILLS), "flips -/+", "tokens", "s"):
        table.add_column(name, justify="right", no_wrap=" " not in name)
    for method, figures in found.items():
        cells = [_cell(figures[skill]) for skill in SKILLS]
        if "tokens" in figures:
            flips = [figures[name]["mean"] for name in ("right_to_wrong", "wrong_to_right")]
            cells += ["/".join(f"{flip:.0f}" for flip in flips), f"{figures['tokens']['mean'] / 1e3:.0f}k"]
            cells.append(f"{figures['seconds']['mean']:.0f}")
        table.add_row(method.replace("_", " "), *cells)
    return table


def _cell(figure: dict[str, float]) -> str:
    text = f"{100 * figure['mean']:.1f}"
    if figure["n"] > 1:
        text += f" ±{100 * (figure['high'] - figure['mean']):.1f}"
    return text + ("*" if figure.get("p", 1.0) < _SIGNIFICANT else "")


if __name__ == "__main__":
    main()
