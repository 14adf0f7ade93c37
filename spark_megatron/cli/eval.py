"""spark-eval: how well a model solves, judges and repairs, and what more tokens at test time buy.

Started plainly it checks everything and launches ``ranks`` processes of itself; started by torchrun it is one of them.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_megatron import runtime
from spark_megatron.schema import ConfigError

if TYPE_CHECKING:
    from spark_megatron.cli.eval_settings import EvaluationConfig
    from spark_megatron.eval.benchmarks import Judged
    from spark_megatron.eval.evaluation import Ask
    from spark_megatron.eval.tables import Solved
    from spark_megatron.types import Group, Task

_USAGE = """\
spark-eval: how well a model solves, judges and repairs, and what more tokens at test time buy.

usage: spark-eval [--check] [name=value ...]

  spark-eval model.path=DIR                                     held-out tasks: accuracy, pass@k, maj@k
  spark-eval model.path=DIR data=sums_in_words test_time=compare   reflection, vote and best of n at equal tokens
  spark-eval model.path=DIR items=0 benchmark=verify_bench benchmark.VerifyBench.path=FILE

A name with a dot is one setting. A name of a group chooses one of its files in conf/, settings that belong together."""


def main() -> None:
    """Entry point of the console script."""
    from spark_megatron.cli.train import quiet_libraries

    runtime.prepare_environment()
    quiet_libraries()
    options = {argument for argument in sys.argv[1:] if argument.startswith("-")}
    overrides = [argument for argument in sys.argv[1:] if argument not in options]
    try:
        if unknown := sorted(options - {"--help", "-h", "--check"}):
            raise ConfigError(f"{unknown[0]} is no option; there are --help and --check, all else is name=value")
        if options & {"--help", "-h"}:
            print(usage())
        elif "RANK" in os.environ:
            worker(overrides)
        else:
            sys.exit(start(overrides, only_check="--check" in options))
    except ConfigError as error:
        sys.exit(f"spark-eval: {error}")


def usage() -> str:
    """Purpose, examples, and all groups of settings."""
    from spark_megatron.cli.eval_settings import ROOT
    from spark_megatron.cli.usage import listed

    return "\n".join([_USAGE, "", "groups:", *listed(ROOT)])


def start(overrides: list[str], only_check: bool) -> int:
    """Check the settings and run the ranks; returns the exit code."""
    from spark_megatron.cli.eval_settings import load
    from spark_megatron.cli.launch import quoted, start_ranks
    from spark_megatron.cli.run_dir import reserve

    config = load(overrides)[1]
    if only_check:
        print(f"{config.name}: the settings can work ({config.ranks} ranks)")
        return 0
    run_dir = Path(config.run_dir).absolute()
    reserve(run_dir)
    print(f"{config.name}: {config.model.path}, results in {run_dir}", file=sys.stderr, flush=True)
    return start_ranks("eval", [*overrides, f"run_dir={quoted(run_dir)}"], config.ranks)


def worker(overrides: list[str]) -> None:
    """One rank of the job."""
    import signal

    from torch.distributed.elastic.multiprocessing.errors import record

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    record(_run)(overrides)


def _run(overrides: list[str]) -> None:
    from spark_megatron.cli import run_dir
    from spark_megatron.cli.eval_settings import load
    from spark_megatron.engine import platform

    composed, config = load(overrides)
    if config.ranks != int(os.environ["WORLD_SIZE"]):
        raise ConfigError(f"ranks={config.ranks}, but the launcher started {os.environ['WORLD_SIZE']} processes")
    runtime.start(platform.distributed_backend(), config.timeout_s)
    try:
        if runtime.rank() == 0:
            run_dir.prepare(Path(config.run_dir), composed, 0)
        evaluate(config)
    finally:
        runtime.stop()


def evaluate(config: EvaluationConfig) -> None:
    """Everything that the settings ask for; rank zero prints and writes it. A collective."""
    from hydra.utils import instantiate
    from transformers import AutoTokenizer

    from spark_megatron.data.curriculum import Shuffled
    from spark_megatron.data.stream import TaskStream
    from spark_megatron.eval.benchmarks import Questions
    from spark_megatron.eval.evaluation import Evaluator
    from spark_megatron.eval.test_time import Judge
    from spark_megatron.trainers.parts import stop_tokens

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    benchmarks: dict[str, Any] = instantiate(config.benchmark)
    questions = {name: found.tasks for name, found in benchmarks.items() if isinstance(found, Questions)}
    if config.items:
        stream = TaskStream(
            source=instantiate(config.data.source),
            seed=0,
            heldout_share=config.data.heldout_share,
            order=Shuffled(),
            heldout_source=instantiate(config.data.heldout),
        )
        questions = {"held-out": stream.heldout(config.items), **questions}
    runtime.say("starting the sampler")
    sampler = instantiate(
        config.rollout.backend,
        model=config.model.path,
        tokenizer=tokenizer,
        dtype=config.model.dtype,
        stop_tokens=stop_tokens(config.model.path, tokenizer),
        read_weights=True,
    )
    evaluator = Evaluator(
        ask=asker(config, sampler, tokenizer),
        judge=Judge(instantiate(config.judge.bank), config.judge.verifier),
        decode=partial(tokenizer.decode, skip_special_tokens=True),
        methods=config.test_time.methods,
        rounds=config.test_time.rounds,
        samples=config.rollout.samples_per_task,
        ks=config.ks,
        score=config.test_time.score,
    )
    try:
        solved = {name: evaluator.solve(name, tasks) for name, tasks in questions.items()}
        judging = {name: found for name, found in benchmarks.items() if name not in questions}
        judged = {name: evaluator.judged(name, found) for name, found in judging.items()}
    finally:
        sampler.close()
    if runtime.rank() == 0:
        publish(config, solved, judged)


def asker(config: EvaluationConfig, sampler: Any, tokenizer: Any) -> Ask:
    """Asks the sampler in batches, and says how far it has come."""
    from hydra.utils import instantiate

    from spark_megatron.rewards.scoring import score_groups
    from spark_megatron.rollout.groups import sample_groups
    from spark_megatron.rollout.lengths import ResponseLengths
    from spark_megatron.tracking.progress import Progress

    check = partial(score_groups, verifiers=instantiate(config.verifiers))
    lengths = ResponseLengths()
    progress = Progress(sys.stderr if runtime.rank() == 0 else io.StringIO())

    def ask(what: str, tasks: Sequence[Task], n: int) -> list[Group]:
        groups: list[Group] = []
        progress.start(what, len(tasks))
        for begin in range(0, len(tasks), config.batch):
            phase = sample_groups(
                sampler,
                tokenizer,
                tasks[begin : begin + config.batch],
                check,
                lengths,
                n=n or 1,
                temperature=config.rollout.temperature if n else 0.0,
                max_new_tokens=config.rollout.max_new_tokens,
                seed=(config.seed, what, begin),
                timeout_s=config.timeout_s,
            )
            groups += phase.groups
            progress.advance(len(phase.groups))
        return groups

    return ask


def publish(config: EvaluationConfig, solved: Mapping[str, Solved], judged: Mapping[str, Judged]) -> None:
    """Print the tables; write results.json, csv files and, where methods of test time ran, tokens.png."""
    from rich.console import Console

    from spark_megatron.eval import tables

    directory, console = Path(config.run_dir), Console(highlight=False)
    for name, result in solved.items():
        console.print(tables.solving_table(name, result))
    if judged:
        console.print(tables.judging_table(judged))
    paper = tables.paper_rows(solved, judged)
    for table, rows in paper.items():
        console.print(tables.paper_table(table, rows))
        named = [{"": method, **row} for method, row in rows.items()]
        _write_csv(directory / f"{table.lower().replace(' ', '_')}.csv", list(named[0]), named)
    figures = {"model": config.model.path, **tables.as_json(solved, judged), "paper": paper}
    (directory / "results.json").write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    _write_csv(directory / "results.csv", tables.RECORD, tables.records(solved, judged))
    if config.test_time.methods:
        _draw(config, solved, directory / "tokens.png")
    print(f"done: {directory}", file=sys.stderr)


def _write_csv(path: Path, fields: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fields)
        writer.writeheader()
        writer.writerows(rows)


def _draw(config: EvaluationConfig, solved: Mapping[str, Solved], path: Path) -> None:
    from spark_megatron.report.tokens import save_token_curves

    curves = {
        name: {
            method: [(stage.tokens / len(stage.rewards), stage.accuracy) for stage in stages]
            for method, stages in result.methods.items()
        }
        for name, result in solved.items()
    }
    save_token_curves(curves, path, config.model.path)


if __name__ == "__main__":
    main()
