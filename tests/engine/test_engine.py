"""The engine on every parallel layout against transformers and torch's AdamW, in fp32.

Tolerances: both sides round differently in fp32 (order of summation, softmax over split vocabularies), which shows as a
few 1e-6 relative; a wrong factor, a lost slice or a missing reduction shows as 1e-2 and more.
"""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from spark_megatron.engine.weights.home import position
from tests import tiny_models
from tests import training_rows as step
from tests.engine.conftest import Answers
from tests.engine.layouts import CASES, LAYOUTS, MODELS

NEAR = 1e-5


@cache
def _oracle(path: Path, rows: int = 13, updates: int = step.UPDATES) -> step.Oracle:
    return step.oracle(tiny_models.load(path), step.samples(rows), updates)


def assert_near(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert set(found) == set(expected) | {"skipped"}
    assert found["skipped"] == 0
    for key, value in expected.items():
        # Some statistics are 0 up to rounding (a sum over no token): those may differ by as much as rounding adds.
        assert found[key] == pytest.approx(value, rel=NEAR, abs=NEAR), key


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_logprobs_are_those_of_transformers(
    layout: str, model: str, ranks: Answers, model_paths: dict[str, Path]
) -> None:
    """At temperature 0.7, at every position of every packed sequence, on every rank."""
    loaded = tiny_models.load(model_paths[model])
    for rank in ranks:
        for batch in rank[model]["training"]["batches"]:
            with torch.no_grad():
                expected, _ = step.model_logprobs(loaded, batch)
            assert batch.old_logprobs is not None
            torch.testing.assert_close(batch.old_logprobs, expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_loss_and_gradient_of_every_parameter(
    layout: str, model: str, ranks: Answers, model_paths: dict[str, Path]
) -> None:
    """Against autograd on transformers: each element within 1e-5 of its tensor's largest."""
    expected = _oracle(model_paths[model])
    found = ranks[0][model]["training"]
    assert found["gradient"].keys() == expected.gradient.keys()
    for name, tensor in expected.gradient.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(found["gradient"][name], tensor, rtol=0, atol=NEAR * scale)
    for rank in ranks:
        assert_near(rank[model]["training"]["stats"][0], expected.stats[0])


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_three_updates_equal_torch_adamw_on_transformers(
    layout: str, model: str, ranks: Answers, model_paths: dict[str, Path]
) -> None:
    """Loss, gradient norm, learning rate, entropy, KL, ratio and all else that the loss reports, then the weights."""
    expected = _oracle(model_paths[model])
    for rank in ranks:
        answer = rank[model]["training"]
        assert answer["version"] == step.UPDATES
        for found, wanted in zip(answer["stats"], expected.stats, strict=True):
            assert_near(found, wanted)
    after = ranks[0][model]["training"]["after"]
    assert after.keys() == expected.after.keys()
    for name, tensor in expected.after.items():
        # The three updates move a weight by up to 3e-4; rounding a weight of 0.5 moves it by 3e-8.
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("model", MODELS)
def test_the_step_tests_what_it_should(model: str, model_paths: dict[str, Path]) -> None:
    """Rows of both losses, an active KL term, gradients that are clipped, ratios that leave 1 and partly the bounds."""
    first, *_, last = _oracle(model_paths[model]).stats
    assert first["supervised_tokens"] > 0 < first["kl"]
    assert first["grad_norm"] > step.OPTIM["clip_grad"]
    assert first["ratio"] == pytest.approx(first["policy_tokens"])
    assert 0 < last["clipped"] < last["policy_tokens"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_are_those_of_megatron_core(layout: str, request: pytest.FixtureRequest) -> None:
    """What the plan of a hand-over assumes of ranks that do not run, against the process groups of those that do."""
    world, degrees, _ = LAYOUTS[layout]
    job: Answers = request.getfixturevalue({1: "single", 2: "pair", 4: "four"}[world])
    found = [rank[f"position_{layout}"] for rank in job]
    assert found == [position(rank, degrees, world) for rank in range(world)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_and_held_logprobs_are_bitwise_equal(layout: str, ranks: Answers) -> None:
    """The same weights give the same bits, also when they come back as a snapshot; updated ones do not."""
    for rank in ranks:
        for answer in rank.values():
            assert answer["training"]["repeats"]
            assert answer["training"]["held"]
            assert answer["training"]["moved"]


def test_the_cut_into_microbatches_changes_nothing(single: Answers, model_paths: dict[str, Path]) -> None:
    """One row each, a few rows each, all rows in one."""
    for found in single[0]["once"]["cuts"].values():
        assert_near(found, _oracle(model_paths["qwen2"]).stats[0])


@pytest.mark.parametrize("layout", ["dp2", "cp2", "pp2_vp2", "ep2"])
def test_ranks_without_samples_take_part(layout: str, pair: Answers, model_paths: dict[str, Path]) -> None:
    """One row for two data ranks, two context ranks, two interleaved stages or two ranks of experts."""
    model = "qwen3_moe" if layout == "ep2" else "llama3"
    [expected] = _oracle(model_paths[model], rows=1, updates=1).stats
    for rank in pair:
        assert_near(rank[f"idle_{layout}"]["stats"][0], expected)


def test_unmarked_slices_would_be_left_out_of_the_gradient_norm(pair: Answers, model_paths: dict[str, Path]) -> None:
    """Without the marks that the weight table sets, the norm at TP=2 misses half of every sliced parameter."""
    expected = _oracle(model_paths["llama3"]).stats[0]["grad_norm"]
    assert pair[0]["tp2"]["llama3"]["training"]["stats"][0]["grad_norm"] == pytest.approx(expected, rel=NEAR)
    assert pair[0]["unmarked"]["grad_norm"] < 0.95 * expected


def test_bf16_loads_rounded_weights_and_follows_fp32(single: Answers, model_paths: dict[str, Path]) -> None:
    """bf16 keeps 8 bits: a loss of some units agrees to 2 %, a gradient norm to 5 %."""
    answer = single[0]["once"]["bf16"]
    expected = _oracle(model_paths["qwen2"]).stats[0]
    assert answer["loaded"]
    assert answer["dtypes"] == {torch.bfloat16}
    assert answer["stats"]["cross_entropy"] == pytest.approx(expected["cross_entropy"], rel=0.02)
    assert answer["stats"]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_a_gradient_that_is_not_finite_skips_the_update(single: Answers) -> None:
    """Nothing moves, it is counted, and the next good update is bit by bit the one that would have come first."""
    answer = single[0]["once"]["nan"]
    assert [stats["skipped"] for stats in answer["stats"]] == [1, 1]
    assert not any(math.isfinite(stats["grad_norm"]) for stats in answer["stats"])
    assert answer["untouched"]
    assert (answer["version"], answer["counted"]) == (0, 2)
    assert answer["goes_on"]


def test_nan_outside_of_the_trained_positions_changes_nothing(single: Answers) -> None:
    assert single[0]["once"]["outside"]


@pytest.mark.parametrize("job", ["single", "pair"])
def test_frozen_tensors_stay_and_all_others_move(job: str, request: pytest.FixtureRequest) -> None:
    """The tied embedding with both of its copies, and one layer; on one rank and on two pipeline stages."""
    [answer, *_] = request.getfixturevalue(job)
    answer = answer["once"]["frozen"] if job == "single" else answer["frozen_pp2"]
    held = {name for name, moved in answer["moved"].items() if not moved}
    assert held == {
        name for name in answer["moved"] if name == "model.embed_tokens.weight" or name.startswith("model.layers.1.")
    }


def test_patterns_of_frozen_tensors_that_cannot_be_meant_are_refused(single: Answers) -> None:
    refusals = single[0]["once"]["frozen_refusals"]
    assert "model.embd* matches no tensor" in refusals["model.embd*"]
    assert "q_proj" in refusals["*.q_proj.*"]
    assert "freeze all of them or none" in refusals["*.q_proj.*"]


def test_offloaded_optimizer_state_gives_the_same_bits_and_no_memory(single: Answers) -> None:
    for answer in single[0]["once"]["offload"].values():
        assert answer["equal"]
        assert answer["held"][0] > 0 == answer["held"][1]


def test_learning_rates_warm_up_and_decay(single: Answers) -> None:
    """Two warm-up updates from 0, then down to min_lr at update 6 of 6, and no further."""
    top, low = step.OPTIM["lr"], step.OPTIM["min_lr"]
    shares = {
        "constant": [1, 1, 1, 1],
        "linear": [0.75, 0.5, 0.25, 0],
        "cosine": [0.8535534, 0.5, 0.1464466, 0],
        "wsd": [1, 1, 0.5, 0],  # the last two of six
    }
    for decay, rates in single[0]["once"]["learning_rates"].items():
        expected = [0, top / 2, top, *(low + (top - low) * share for share in shares[decay])]
        assert rates[:7] == pytest.approx(expected, rel=1e-6)
        assert rates[7] == rates[6]
