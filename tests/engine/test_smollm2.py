"""A real instruct model, made from a PyPI package, gives the same logits as in transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import distributed

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "smollm2_135m"
QUESTIONS = [f"What is {i} + {3 * i}? Then name a country whose name has {i + 3} letters." for i in range(10)]


@pytest.fixture(scope="module")
def model() -> Path:
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "tools/import_smollm2.py"], cwd=REPOSITORY, check=True)
    return MODEL


def test_megatron_logits_equal_transformers(model: Path, tmp_path: Path) -> None:
    """On 10 prompts in fp32; 1e-3 leaves room for another order of summation over 30 layers."""
    (differences,) = distributed.run(
        1, "tests.engine.ranks_smollm2:logit_differences", tmp_path / "job", model=model, texts=QUESTIONS
    )
    assert len(differences) == 10
    assert max(differences) <= 1e-3
