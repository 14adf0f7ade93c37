"""Settings and tiny models that all tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_megatron import runtime

# torch and vLLM read these once, at import.
runtime.prepare_environment()

ModelDirectory = Callable[..., Path]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """``model_directory(name, seed)`` is a HF directory with a tiny random model (see ``tests/tiny_models.py``)."""
    root = tmp_path_factory.mktemp("models")

    def directory(name: str, seed: int = 0) -> Path:
        from tests import tiny_models

        path = root / f"{name}_{seed}"
        if not path.exists():
            tiny_models.save(name, path, seed)
        return path

    return directory
