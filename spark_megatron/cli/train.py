"""spark-train: compose the settings, then run them on all ranks.

Started plainly it checks everything, launches ``parallel.ranks`` processes of itself and watches over them. Started by
torchrun (or srun) it is one of these processes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spark_megatron import runtime
from spark_megatron.config import Config
from spark_megatron.schema import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from spark_megatron.cli.resume import Start


def main() -> None:
    """Entry point of the console script."""
    runtime.prepare_environment()
    quiet_libraries()
    options = {argument for argument in sys.argv[1:] if argument.startswith("-")}
    overrides = [argument for argument in sys.argv[1:] if argument not in options]
    try:
        if options:
            _obey(options, overrides)
        elif "RANK" in os.environ:
            worker(overrides)
        else:
            from spark_megatron.cli import launch

            sys.exit(launch.launch(overrides))
    except ConfigError as error:
        sys.exit(f"spark-train: {error}")


def _obey(options: set[str], overrides: list[str]) -> None:
    """Print the help, or check the settings; nothing is started."""
    from spark_megatron.cli import compose, usage

    unknown = sorted(options - {"--help", "-h", "--check"})
    if unknown:
        raise ConfigError(f"{unknown[0]} is no option; there are --help and --check, all else is written name=value")
    if options & {"--help", "-h"}:
        print(usage.usage())
    else:
        config = compose.load(overrides)[1]
        ranks, steps = config.parallel.ranks, config.trainer.total_steps
        print(f"{config.name}: the settings can work ({ranks} ranks, {steps} steps)")


def quiet_libraries() -> None:
    """Missing CUDA extensions and deprecations inside the libraries are not the user's; what fails still raises."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch|vllm)\.")
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # when a library is compiled at its first import
    for library in ("vllm", "torch._library.triton"):
        logging.getLogger(library).setLevel(logging.ERROR)


def worker(overrides: list[str]) -> None:
    """One rank of the job."""
    # The defaults end a process that waits in a collective at once; Python's own handlers would wait for it to return.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_run)(overrides)


def _run(overrides: list[str]) -> None:
    from spark_megatron.cli.compose import load
    from spark_megatron.engine import platform
    from spark_megatron.trainers.run import run

    composed, config = load(overrides)
    if config.parallel.ranks != int(os.environ["WORLD_SIZE"]):
        raise ConfigError(
            f"parallel.ranks={config.parallel.ranks}, but the launcher started {os.environ['WORLD_SIZE']} processes: "
            f"set parallel.ranks={os.environ['WORLD_SIZE']} or choose another parallel=..."
        )
    runtime.start(platform.distributed_backend(), config.engine.timeout_s)
    try:
        if runtime.rank():
            logging.getLogger("spark_megatron").setLevel(logging.ERROR)  # one warning is enough
        directory = Path(runtime.broadcast_from_zero(config.run_dir)).absolute()
        config = replace(config, run_dir=str(directory))
        start = runtime.decided_by_zero(partial(begin, config, composed), ConfigError)
        if not start.finished:
            run(config, start.checkpoint)
    finally:
        runtime.stop()


def begin(config: Config, composed: DictConfig) -> Start:
    """Say how the run starts and, where it does, write its settings."""
    from spark_megatron.cli import resume, run_dir

    start = resume.plan(config)
    runtime.say(start.message)
    if not start.finished:
        run_dir.prepare(Path(config.run_dir), composed, start.step)
    return start


if __name__ == "__main__":
    main()
