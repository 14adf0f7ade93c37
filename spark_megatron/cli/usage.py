"""What ``spark-train --help`` prints."""

from __future__ import annotations

from spark_megatron.cli.compose import groups
from spark_megatron.paths import conf_dir

_PURPOSE = """\
spark-train: post-train a language model with SPARK: it learns to solve tasks and to judge and repair answers.

usage: spark-train [--check] [name=value ...]

  spark-train experiment=spark_tiny                            a small run on two CPU cores
  spark-train experiment=spark_tiny kl_schedule=cosine seed=1  another choice of a group, another value
  spark-train --check experiment=spark_tiny optim.lr=1e-4      only look whether the settings can work

A name with a dot is one setting. A name of a group chooses one of its files in conf/, settings that belong together."""


def listed(root: str) -> list[str]:
    """A line for each group of a command's settings, with its choices."""
    choices = groups(root)
    width = max(map(len, choices))
    return [f"  {group:{width}}  {', '.join(names)}" for group, names in choices.items()]


def usage() -> str:
    """Purpose, examples, and all groups and experiments of conf/."""
    choices = groups()
    experiments = choices.pop("experiment", [])
    width = max(map(len, [*choices, *experiments]))
    lines = [_PURPOSE, "", "groups:"]
    lines += [f"  {group:{width}}  {', '.join(names)}" for group, names in choices.items()]
    lines += ["", "experiments:"]
    lines += [f"  {name:{width}}  {_description(name)}" for name in experiments]
    return "\n".join(lines)


def _description(experiment: str) -> str:
    """The first comment of an experiment's file that is not an instruction to Hydra."""
    lines = (conf_dir() / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line[2:] for line in lines if line.startswith("# ") and "@package" not in line), "")
