"""What the parts of a run are built from."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_megatron.trainers.parts import stop_tokens
from tests.settings import save_shape


@pytest.mark.parametrize(
    ("own", "generation", "config", "stops"),
    [
        (7, {"eos_token_id": [9, 3]}, 5, [3, 7, 9]),
        (7, {"eos_token_id": 9}, 5, [7, 9]),
        (7, {"max_length": 20}, 5, [7]),
        (7, None, 5, [5, 7]),
        (7, None, [5, 4], [4, 5, 7]),
        (None, {"eos_token_id": 9}, 5, [9]),
    ],
)
def test_responses_end_at_every_stop_of_tokenizer_and_model(
    tmp_path: Path, own: int | None, generation: dict[str, Any] | None, config: Any, stops: list[int]
) -> None:
    """generation_config.json is what the model's makers sample with; config.json counts where there is none."""
    save_shape(tmp_path, eos_token_id=config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer: Any = SimpleNamespace(eos_token_id=own)
    assert stop_tokens(str(tmp_path), tokenizer) == stops
