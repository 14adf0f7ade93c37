"""The run that the tests of this folder share."""

from pathlib import Path

import pytest

from tests.cli.runs import WHOLE, train


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of alternating periods with vLLM, started as a user does."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(run_dir, *WHOLE)
    return run_dir
