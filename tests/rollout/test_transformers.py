"""The reference backend against transformers' own forward pass over whole sequences.

Bound: with a cache and without, log-probs in fp32 differ by a few 1e-6 nats.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spark_megatron.rollout import transformers as backend
from spark_megatron.rollout.base import Request
from spark_megatron.rollout.transformers import TransformersSampler
from spark_megatron.types import Rollout
from tests import tiny_models
from tests.conftest import ModelDirectory

NEAR = 1e-4
STOPS = (2, *range(280, 300))


class Numbers:
    """A tokenizer whose text is the token ids."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(str(token) for token in tokens if token not in STOPS)


def sampler(path: Path, **changed: Any) -> TransformersSampler:
    settings: dict[str, Any] = {"dtype": "fp32", "stop_tokens": STOPS, "batch_size": 3, "max_model_len": 512}
    return TransformersSampler(model=str(path), tokenizer=Numbers(), **settings | changed)


def loaded(path: Path, version: int = 0, **changed: Any) -> TransformersSampler:
    made = sampler(path, **changed)
    made.start_update()
    for item in load_file(path / "model.safetensors").items():
        made.load(dict([item]))
    made.finish_update(version)
    return made


def prompt(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(3, 280) for _ in range(length))


REQUESTS = [Request(prompt(n), k, 0.7, 9, seed=1000 * i) for i, (n, k) in enumerate([(5, 4), (20, 2), (5, 3), (90, 1)])]


def tokens(groups: list[tuple[Rollout, ...]]) -> list[list[tuple[int, ...]]]:
    return [[rollout.tokens for rollout in group] for group in groups]


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_logprobs_are_those_of_the_weights_handed_over(name: str, model_directory: ModelDirectory) -> None:
    path = model_directory(name, 1)
    made, model = loaded(path), tiny_models.load(path)
    for request, group in zip(REQUESTS, made.generate(REQUESTS), strict=True):
        assert len(group) == request.n
        for rollout in group:
            expected = tiny_models.response_logprobs(model, request.prompt, rollout.tokens, 0.7)
            assert (expected - torch.tensor(rollout.logprobs)).abs().max() < NEAR


@pytest.fixture(scope="module")
def path(model_directory: ModelDirectory) -> Path:
    return model_directory("qwen2")


@pytest.fixture(scope="module")
def made(path: Path) -> TransformersSampler:
    return loaded(path, version=3)


def test_temperature_zero_takes_the_likeliest_token(made: TransformersSampler, path: Path) -> None:
    request = Request(prompt(20), 2, 0.0, 9, seed=1)
    [(first, second)] = made.generate([request])
    with torch.no_grad():
        logits = tiny_models.load(path)(torch.tensor([request.prompt + first.tokens])).logits[0, 19:-1]
    assert tuple(logits.argmax(-1).tolist()) == first.tokens == second.tokens
    expected = logits.log_softmax(-1).max(-1).values
    assert (expected - torch.tensor(first.logprobs)).abs().max() < NEAR


def test_sample_i_is_drawn_with_seed_plus_i_whatever_shares_its_batch(made: TransformersSampler, path: Path) -> None:
    text = prompt(20)
    [three] = tokens(made.generate([Request(text, 3, 1.0, 8, seed=50)]))
    assert three == [tokens(made.generate([Request(text, 1, 1.0, 8, seed=50 + i)]))[0][0] for i in range(3)]
    assert len(set(three)) == 3
    together = loaded(path, batch_size=64).generate(REQUESTS)
    assert tokens(together) == tokens(made.generate(REQUESTS)) == tokens(made.generate(REQUESTS[::-1]))[::-1]


def test_responses_end_at_a_stop_or_at_the_limit(made: TransformersSampler) -> None:
    rollouts = [rollout for group in made.generate(REQUESTS) for rollout in group]
    assert {rollout.finish for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert len(rollout.tokens) == len(rollout.logprobs) <= 9
        assert (rollout.tokens[-1] in STOPS) == (rollout.finish == "stop")
        assert not set(rollout.tokens[:-1]) & set(STOPS)
        assert len(rollout.tokens) == 9 or rollout.finish == "stop"
        assert rollout.text == " ".join(str(token) for token in rollout.tokens if token not in STOPS)
        assert rollout.weight_version == 3


def test_an_empty_response_is_a_stop_token_alone(path: Path) -> None:
    made = loaded(path, stop_tokens=range(301))
    for group in made.generate(REQUESTS):
        assert all((len(rollout.tokens), rollout.finish) == (1, "stop") for rollout in group)


def test_what_it_cannot_sample_is_refused(made: TransformersSampler, path: Path) -> None:
    with pytest.raises(RuntimeError, match="holds no weights yet"):
        sampler(path).generate(REQUESTS)
    assert len(made.generate([Request(prompt(503), 1, 0.7, 9, seed=1)])) == 1
    with pytest.raises(ValueError, match="^max_model_len=512: a prompt and its response may take 513 tokens$"):
        made.generate([Request(prompt(504), 1, 0.7, 9, seed=1)])
    with pytest.raises(ValueError, match="^batch_size=0 must be at least 1$"):
        sampler(path, batch_size=0)
    with pytest.raises(ValueError, match="^the model has no tensor model.layer.weight$"):
        made.load({"model.layer.weight": torch.zeros(1)})
    assert made.generate([]) == []


def test_random_states_are_left_alone(path: Path) -> None:
    before = torch.get_rng_state()
    loaded(path).generate(REQUESTS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_what_differs_is_found_by_name_and_row(name: str, model_directory: ModelDirectory) -> None:
    path = model_directory(name)
    made, weights = loaded(path), load_file(path / "model.safetensors")
    assert made.differing(weights) == {}
    for changed in weights:
        tensor = weights[changed].clone()
        tensor[1:2] *= 1 + 2**-20
        found = made.differing({**weights, changed: tensor})
        assert list(found) == [changed]
        assert found[changed].nonzero().tolist() == [[1]]


def test_a_tied_head_with_a_life_of_its_own_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, weights = loaded(path), load_file(path / "model.safetensors")
    head = made.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    monkeypatch.setattr(made, "_in_use", backend._in_use(made.model))
    assert made.differing(weights) == {}
    doubled = {name: tensor * 2 for name, tensor in weights.items()}
    made.load(doubled)
    assert list(made.differing(doubled)) == ["model.embed_tokens.weight"]


def test_bf16_weights_come_in_any_precision(path: Path) -> None:
    made, weights = loaded(path, dtype="bf16"), load_file(path / "model.safetensors")
    assert made.differing(weights) == made.differing({n: w.bfloat16() for n, w in weights.items()}) == {}
    rollouts = [rollout for group in made.generate(REQUESTS) for rollout in group]
    assert all(torch.isfinite(torch.tensor(rollout.logprobs)).all() for rollout in rollouts)
