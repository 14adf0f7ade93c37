"""Hand-overs from real trainer layouts to real vLLM engines, and planted faults that must be found and named.

Bound: fp32 on both sides differs by a few 1e-6 nats, and bf16 by some 1e-2 on rare tokens; each planted fault moves a
log-prob by at least 1e-2.
"""

from typing import Any

import pytest
import torch

from spark_megatron.runtime import HUNG
from tests import distributed, tiny_models
from tests.conftest import ModelDirectory
from tests.hybrid.cases import CASES, Key

NEAR = 1e-4
ALL = [(world, key, i) for world, cases in CASES.items() for key, layouts in cases.items() for i in range(len(layouts))]
ENDS = [(world, key) for world, cases in CASES.items() for key in cases]


def run(world: int, model_directory: ModelDirectory, factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    models = {model: model_directory(model) for model, _, _ in CASES[world]}
    folder = factory.mktemp("handoff")
    function = "tests.hybrid.ranks_handoff:on_all_layouts"
    return distributed.run(world, function, folder / "job", models=models, out=folder)


@pytest.fixture(scope="module")
def two(model_directory: ModelDirectory, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run(2, model_directory, tmp_path_factory)


@pytest.fixture(scope="module")
def four(model_directory: ModelDirectory, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run(4, model_directory, tmp_path_factory)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world: int) -> list[dict[Any, Any]]:
    answers: list[dict[Any, Any]] = request.getfixturevalue({2: "two", 4: "four"}[world])
    return answers


@pytest.mark.parametrize(("world", "key", "number"), ALL, ids=str)
def test_the_sampler_computes_with_the_updated_weights(
    world: int, key: Key, number: int, ranks: list[dict[Any, Any]]
) -> None:
    """Against transformers with the exported weights, on every rank; every tensor was compared too."""
    fp32 = key[1] == "fp32"
    model = tiny_models.load(ranks[0][(*key, number)]["target"])
    for rank in ranks:
        answer = rank[(*key, number)]
        assert answer["version"] == 3
        assert answer["probe_error"] < (NEAR if fp32 else 0.3)
        for request, rollouts in answer["rollouts"]:
            for rollout in rollouts:
                assert rollout.weight_version == 3
                expected = tiny_models.response_logprobs(model, request.prompt, rollout.tokens, 1.0)
                error = (expected - torch.tensor(rollout.logprobs)).abs()
                assert error.max().item() < (NEAR if fp32 else 0.5)


@pytest.mark.parametrize(("world", "key"), ENDS, ids=str)
def test_a_new_vllm_with_the_exported_model_says_the_same(world: int, key: Key, ranks: list[dict[Any, Any]]) -> None:
    """Greedy text and log-probs after three updates. The same vLLM, the same weights: equal but for summation order."""
    last = len(CASES[world][key]) - 1
    for rank in ranks:
        pairs = zip(rank[(*key, last)]["rollouts"], rank[(*key, "fresh")], strict=True)
        for (_, ours), (_, theirs) in pairs:
            assert [r.tokens for r in ours] == [r.tokens for r in theirs]
            for our, their in zip(ours, theirs, strict=True):
                assert our.logprobs == pytest.approx(their.logprobs, abs=1e-5)


@pytest.mark.parametrize(("world", "key", "number"), ALL, ids=str)
def test_the_bytes_sent_are_those_of_the_plan_in_bounded_memory(
    world: int, key: Key, number: int, ranks: list[dict[Any, Any]]
) -> None:
    for rank in ranks:
        sent, planned = rank[(*key, number)]["bytes"]
        assert sent == planned
        assert rank[(*key, number)]["staging"] <= 60_000, "the bucket"


FAULTS = {
    "swapped": ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"],
    "wrong slice": ["model.layers.3.self_attn.k_proj.weight"],
    "dropped": ["model.layers.2.self_attn.o_proj.weight"],
    "nothing": ["lm_head.weight", "model.embed_tokens.weight", "more"],
    "stale head": ["lm_head.weight"],
    "stale cache": ["128 prompt tokens from its prefix cache"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault: str, two: list[dict[Any, Any]]) -> None:
    """All ranks refuse together, and nobody can sample; a good hand-over then works."""
    for rank in two:
        found = rank["faults"][fault]
        assert found["refused"] == -1
        assert f"weights {found['version']}" in found["message"]
        for name in FAULTS[fault]:
            assert name in found["message"]
        assert ("other values of" in found["message"]) == (fault != "stale cache")
        assert found["after"] < NEAR
    if fault in ("swapped", "wrong slice", "dropped", "stale head"):
        told = two[0]["faults"][fault]["message"].partition("other values of ")[2]
        assert told.split(", ") == FAULTS[fault], "and nothing else"


@pytest.mark.parametrize("fault", ["swapped", "dropped", "nothing", "stale head"])
def test_a_difference_of_log_probs_is_told_with_its_bound(fault: str, two: list[dict[Any, Any]]) -> None:
    found = two[0]["faults"][fault]
    assert found["error"] > 1e-2
    assert f"{found['error']:.2e}" in found["message"]
    assert "rollout.max_logprob_error=0.001" in found["message"]


def test_stale_experts_are_named(two: list[dict[Any, Any]]) -> None:
    message = two[0]["expert_faults"]["stale experts"]["message"]
    assert "mlp.experts." in message
    assert "o_proj" not in message
    assert two[0]["expert_faults"]["stale experts"]["after"] < NEAR


def test_turns_are_taken_in_order(two: list[dict[Any, Any]]) -> None:
    """Optimizer, gradients, the sampler's weights, the hand-over, its cache, parameters; and back."""
    for rank in two:
        assert rank["turns"]["order"] == [
            "release optimizer",
            "release gradients",
            "wake weights",
            "start_update",
            "finish_update",
            "wake kv_cache",
            *["differing"] * rank["turns"]["order"].count("differing"),
            "release parameters",
            "sleep",
            "restore",
        ]
        assert rank["turns"]["gradients"] == 0, "their memory is given back while the sampler works"


def test_weights_stay_while_nobody_trains(two: list[dict[Any, Any]]) -> None:
    """A turn within a turn moves nothing; after sleep the sampler refuses to work without new weights; three cycles of
    sleeping and waking on the same weights sample the same."""
    for rank in two:
        turns = rank["turns"]
        assert turns["repeats"]
        assert turns["lost"] == -1
        assert "holds no weights" in turns["asleep"]
        assert turns["cycles"][0] == turns["cycles"][1] == turns["cycles"][2]


def test_a_change_of_turns_is_accounted_for(two: list[dict[Any, Any]]) -> None:
    figures = two[0]["turns"]["figures"]
    phases = {
        "release_s",
        "wake_weights_s",
        "handoff_s",
        "install_s",
        "wake_cache_s",
        "proof_s",
        "sleep_s",
        "restore_s",
    }
    assert phases <= figures.keys()
    assert 0 < figures["install_s"] < figures["handoff_s"]
    assert figures["released_bytes"] > 0
    assert figures["probe_max_abs"] < NEAR


def test_a_sampler_without_a_model_is_not_compared(two: list[dict[Any, Any]]) -> None:
    assert [rank["without_model"] for rank in two] == [0, 0]


def test_a_hand_over_that_hangs_ends_the_process(two: list[dict[Any, Any]]) -> None:
    assert [rank["hung"] for rank in two] == [HUNG, HUNG]


def test_settings_of_probe_release_and_sleep(two: list[dict[Any, Any]]) -> None:
    """Log-probs at every second hand-over and tensors at every third, the gradients' memory alone released, and, of a
    sampler that does not sleep, nothing moved while nobody trains."""
    for rank in two:
        found = rank["settings"]
        assert found["probed"] == [True, False, True, False, True]
        assert found["compared"] == [True, False, False, True, False]
        assert found["released"] == ["release gradients"]
        assert all(found["bytes"][1:5]), "they were away at the first"
        assert not any(found["bytes"][5:])
        assert found["moved"] == [True, False]
