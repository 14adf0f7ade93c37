"""The engine on every parallel layout against transformers and torch's AdamW, in fp32.

Tolerances: both sides round differently in fp32 (order of summation, softmax over split vocabularies), which shows as a
few 1e-6 relative; a wrong factor, a lost slice or a missing reduction shows as 1e-2 and more.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests import training_rows as step
from tests.engine.conftest import LAYOUTS, MODELS, Answers

NEAR = 1e-5


@cache
def _oracle(path: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    model = tiny_models.load(path)
    stats = step.oracle(model, step.samples())
    return stats, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_near(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        # Some statistics are 0 up to rounding (a sum over no token): those may differ by as much as rounding adds.
        assert found[key] == pytest.approx(value, rel=NEAR, abs=NEAR), key


def trainings(ranks: Answers) -> list[tuple[str, dict[str, Any]]]:
    return [(model, answer["training"]) for rank in ranks for model, answer in rank.items()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_are_those_of_transformers(layout: str, ranks: Answers, model_paths: dict[str, Path]) -> None:
    """At temperature 0.7, at every position of every padded row, on every rank."""
    loaded = {name: tiny_models.load(path) for name, path in model_paths.items()}
    for name, answer in trainings(ranks):
        for batch in answer["batches"]:
            with torch.no_grad():
                expected, _ = step.model_logprobs(loaded[name], batch)
            assert batch.old_logprobs is not None
            torch.testing.assert_close(batch.old_logprobs, expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_updates_equal_torch_adamw_on_transformers(
    layout: str, ranks: Answers, model_paths: dict[str, Path]
) -> None:
    """Loss, gradient norm, learning rate, entropy, KL, ratio and all else that the loss reports, then the weights."""
    for name, answer in trainings(ranks):
        stats, weights = _oracle(model_paths[name])
        assert answer["version"] == step.UPDATES
        for found, expected in zip(answer["stats"], stats, strict=True):
            assert_near(found, expected)
        for key, tensor in answer["after"].items():
            # The three updates move a weight by up to 3e-4; rounding a weight of 0.5 moves it by 3e-8.
            torch.testing.assert_close(tensor, weights[key], rtol=1e-6, atol=3e-7)


def test_the_step_tests_what_it_should(model_paths: dict[str, Path]) -> None:
    """Rows of both losses, an active KL term, gradients that are clipped, ratios that leave 1 and partly the bounds."""
    for name in MODELS:
        first, *_, last = _oracle(model_paths[name])[0]
        assert first["supervised_tokens"] > 0 < first["kl"]
        assert first["grad_norm"] > step.OPTIM["clip_grad"]
        assert first["ratio"] == pytest.approx(first["policy_tokens"])
        assert 0 < last["clipped"] < last["policy_tokens"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_and_held_logprobs_are_bitwise_equal(layout: str, ranks: Answers) -> None:
    """The same weights give the same bits, also when they come back as a snapshot; updated ones do not."""
    for _, answer in trainings(ranks):
        assert answer["repeats"]
        assert answer["held"]
        assert answer["moved"]


def test_the_cut_into_microbatches_changes_nothing(single: Answers, model_paths: dict[str, Path]) -> None:
    """One row each, a few rows each, all rows in one."""
    for found in single[0]["once"]["cuts"].values():
        assert_near(found, _oracle(model_paths["qwen2"])[0][0])


def test_a_data_rank_without_samples_takes_part(pair: Answers, model_paths: dict[str, Path]) -> None:
    [expected] = step.oracle(tiny_models.load(model_paths["llama"]), step.samples(1), updates=1)
    for rank in pair:
        assert_near(rank["idle_rank"]["stats"][0], expected)


def test_unmarked_slices_would_be_left_out_of_the_gradient_norm(pair: Answers, model_paths: dict[str, Path]) -> None:
    """Without the marks that the weight table sets, the norm at TP=2 misses half of every sliced parameter."""
    expected = _oracle(model_paths["llama"])[0][0]["grad_norm"]
    assert pair[0]["tp2"]["llama"]["training"]["stats"][0]["grad_norm"] == pytest.approx(expected, rel=NEAR)
    assert pair[0]["unmarked"]["grad_norm"] < 0.95 * expected


def test_bf16_loads_rounded_weights_and_follows_fp32(single: Answers, model_paths: dict[str, Path]) -> None:
    """bf16 keeps 8 bits: a loss of some units agrees to 2 %, a gradient norm to 5 %."""
    answer = single[0]["once"]["bf16"]
    expected = _oracle(model_paths["qwen2"])[0][0]
    assert answer["loaded"]
    assert answer["dtypes"] == {torch.bfloat16}
    assert answer["stats"]["cross_entropy"] == pytest.approx(expected["cross_entropy"], rel=0.02)
    assert answer["stats"]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_a_gradient_that_is_not_finite_is_refused(single: Answers) -> None:
    assert "gradient norm is nan" in single[0]["once"]["nan"]


def test_learning_rates_warm_up_and_decay(single: Answers) -> None:
    """Two warm-up updates from 0, then down to min_lr at update 6 of 6, and no further."""
    top, low = step.OPTIM["lr"], step.OPTIM["min_lr"]
    quarters = {"constant": [1, 1, 1, 1], "linear": [0.75, 0.5, 0.25, 0], "cosine": [0.8535534, 0.5, 0.1464466, 0]}
    for decay, shares in quarters.items():
        expected = [0, top / 2, top, *(low + (top - low) * share for share in shares)]
        assert single[0]["once"]["learning_rates"][decay][:7] == pytest.approx(expected, rel=1e-6)
        assert single[0]["once"]["learning_rates"][decay][7] == single[0]["once"]["learning_rates"][decay][6]
