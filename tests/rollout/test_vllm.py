"""The vLLM backend against transformers: right log-probs after every hand-over, and wrong ones without each cure.

Bound: vLLM and transformers in fp32 differ by a few 1e-6 nats from other orders of summation. Wrong weights, a stale
cache or a wrong temperature move log-probs of these models by 0.1 and more.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spark_megatron.architecture import Architecture
from spark_megatron.rollout.transformers import TransformersSampler
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.types import Rollout
from tests import distributed, tiny_models
from tests.conftest import ModelDirectory

NEAR = 1e-4
FAR = 0.05
DENSE = ("llama", "qwen2_untied", "qwen3")
STOPS = (2, *range(280, 300))
"""Many, so that some responses of a random model stop before their limit."""


@pytest.fixture(scope="module")
def models(model_directory: ModelDirectory) -> dict[str, tuple[Path, Path]]:
    return {name: (model_directory(name, 0), model_directory(name, 1)) for name in ("qwen2", *DENSE, "qwen3_moe")}


@pytest.fixture(scope="module")
def answers(models: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank's answers."""
    folder = tmp_path_factory.mktemp("vllm") / "job"
    return distributed.run(1, "tests.rollout.ranks_vllm:one_rank", folder, models=models, dense=DENSE, stops=STOPS)[0]


@pytest.fixture(scope="module")
def two_jobs(models: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The answers of two jobs that run at the same time, each with an engine over its two ranks."""
    root = tmp_path_factory.mktemp("jobs")
    first, second = models["qwen2"]
    jobs = [
        distributed.start(
            2,
            "tests.rollout.ranks_vllm:tensor_parallel",
            root / f"job{i}",
            first=first,
            mine=(first, second)[i],
            stops=STOPS,
            started=root / f"started{i}",
            other_started=root / f"started{1 - i}",
        )
        for i in range(2)
    ]
    return [job.results() for job in jobs]


def expected_shapes(directory: Path, degree: int) -> dict[str, tuple[int, ...]]:
    """What our own table says of a vLLM model's parameters; the experts of a layer are stacked."""
    shapes: dict[str, tuple[int, ...]] = {}
    model = Architecture.of(json.loads((directory / "config.json").read_text()))
    for row in vllm_rows(model):
        before = () if row.expert is None else (model.experts,)
        shapes[row.full_name] = (*before, *row.shard_shape(degree))
    return shapes


def test_the_table_has_vllm_s_own_parameters(
    answers: dict[str, Any], two_jobs: list[list[Any]], models: dict[str, tuple[Path, Path]]
) -> None:
    """Names and shapes, tied and untied, with biases, with query and key norms, of experts, and of one of two ranks."""
    for name in DENSE:
        assert answers["shapes"][name] == expected_shapes(models[name][0], 1)
    assert answers["shapes_tied"] == expected_shapes(models["qwen2"][0], 1)
    assert answers["experts"]["shapes"] == expected_shapes(models["qwen3_moe"][0], 1)
    assert two_jobs[0][1]["shapes"] == expected_shapes(models["qwen2"][0], 2)


def error(answer: Any, directory: Path, temperature: float = 0.7) -> float:
    """The largest distance of a rollout's log-prob from transformers' with the weights of ``directory``."""
    model = tiny_models.load(directory)
    return max(
        (
            tiny_models.response_logprobs(model, request.prompt, rollout.tokens, temperature)
            - torch.tensor(rollout.logprobs)
        )
        .abs()
        .max()
        .item()
        for request, rollouts in answer
        for rollout in rollouts
    )


def all_rollouts(answer: Any) -> list[Rollout]:
    return [rollout for _, rollouts in answer for rollout in rollouts]


def test_nothing_is_sampled_before_weights_came(answers: dict[str, Any]) -> None:
    assert "holds no weights yet" in answers["too_early"]


def test_a_tied_model_is_right_after_each_hand_over(
    answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    first, second = models["qwen2"]
    assert error(answers["first"], first) < NEAR
    assert error(answers["second"], second) < NEAR
    assert error(answers["second"], first) > FAR


def test_a_tied_head_would_be_stale_without_repacking(
    answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    assert error(answers["without_repacking"], models["qwen2"][0]) > FAR


@pytest.mark.parametrize("name", DENSE)
def test_other_families_are_right_after_an_update_in_reverse_order(
    name: str, answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    assert error(answers["updated"][name], models[name][1]) < NEAR


def test_experts_are_right_after_an_update_and_would_be_stale(
    answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    first, second = models["qwen3_moe"]
    assert error(answers["experts"]["second"], second) < NEAR
    assert error(answers["experts"]["without_forgetting"], first) > FAR


def test_the_prefix_cache_is_used_and_dropped_with_the_weights(
    answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    second = models["qwen2"][1]
    assert answers["cached_tokens"] == 256, "two blocks of 128 tokens"
    assert error(answers["after_reset"], second) < NEAR
    assert error(answers["without_reset"], second) > FAR
    assert "could not drop its prefix cache" in answers["reset_refused"]


def test_logprobs_are_those_of_the_temperature_sampled_at(
    answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    second = models["qwen2"][1]
    assert error(answers["at_one"], second, temperature=1.0) < NEAR
    assert error(answers["second"], second, temperature=0.7) < NEAR
    assert error(answers["raw"], second, temperature=0.7) > FAR, "vLLM's default ignores the temperature"
    assert error(answers["raw"], second, temperature=1.0) < NEAR


def test_temperature_zero_takes_the_likeliest_token(
    answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    model = tiny_models.load(models["qwen2"][1])
    for request, (rollout,) in answers["greedy"]:
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt + rollout.tokens])).logits[0, len(request.prompt) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == rollout.tokens


def test_the_reference_backend_writes_the_same_greedy_text(
    answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    path = models["qwen2"][1]
    silent: Any = SimpleNamespace(decode=lambda *_, **__: "")
    reference = TransformersSampler(
        model=str(path), tokenizer=silent, dtype="fp32", stop_tokens=STOPS, batch_size=4, max_model_len=512
    )
    reference.load(load_file(path / "model.safetensors"))
    reference.finish_update(1)
    requests = [request for request, _ in answers["greedy"]]
    for (_, (theirs,)), (ours,) in zip(answers["greedy"], reference.generate(requests), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.finish == theirs.finish
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=NEAR)


def test_memory_for_one_sequence_is_needed_and_enough(answers: dict[str, Any]) -> None:
    """What is refused before a start is what vLLM refuses: "raw" was sampled with the smallest number of megabytes."""
    assert answers["raw"]
    assert answers["too_little_memory"].startswith(
        "rollout.backend.kv_cache_mb=1 with rollout.backend.max_model_len=512: vLLM does not start with this memory, "
        "change one of them: To serve at least one request"
    )


def test_random_states_are_left_alone(answers: dict[str, Any]) -> None:
    """Of python, numpy and torch: building an engine reseeds all three unless they are put back."""
    before, after = answers["states"]
    assert before == after
    before, after = answers["states_without_cure"]
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_sample_i_of_a_request_is_drawn_with_seed_plus_i(answers: dict[str, Any]) -> None:
    tokens = answers["seeds"]
    assert tokens["three"] == tokens["one_by_one"]
    assert len(set(tokens["three"])) == 3
    assert tokens["equal"][0] == tokens["equal"][1], "equal seeds repeat the sample: seeds must differ per request"
    assert tokens["apart"][0] != tokens["apart"][1]


def test_rollouts_tell_how_they_ended_and_from_which_weights(answers: dict[str, Any]) -> None:
    rollouts = all_rollouts(answers["second"])
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert len(rollout.tokens) == len(rollout.logprobs)
        assert (rollout.tokens[-1] in STOPS) == (rollout.finish == "stop")
        assert (len(rollout.tokens) == 8) or rollout.finish == "stop"
        assert not set(rollout.tokens[:-1]) & set(STOPS)
        assert rollout.text == " ".join(str(t) for t in rollout.tokens if t not in STOPS)
        assert rollout.weight_version == 1
    assert {r.weight_version for r in all_rollouts(answers["first"])} == {0}
    assert answers["vllm_version"] == "1"


def test_seeded_requests_survive_more_prompt_tokens_than_a_batch_takes(
    answers: dict[str, Any], models: dict[str, tuple[Path, Path]]
) -> None:
    """24 prompts of 40 to 293 tokens, 320 tokens in a batch."""
    assert error(answers["many_prompts"], models["qwen2"][1]) < NEAR
    assert "offset" in answers["chunked"], "with chunked prefill vLLM cannot rewind a CPU generator"


def test_closing_leaves_the_job_running(answers: dict[str, Any]) -> None:
    assert answers["after_close"] == (True, 1)


def test_two_jobs_on_one_host_do_not_meet(two_jobs: list[list[Any]], models: dict[str, tuple[Path, Path]]) -> None:
    """Each with tensor_parallel=2 and its own weights; without the cure both would name their memory alike.

    Whether vLLM's ranks meet in shared memory at all depends on the CPU; its name is the same everywhere.
    """
    for answers, directory in zip(two_jobs, models["qwen2"], strict=True):
        for rank in answers:
            assert rank["overlapped"]
            assert rank["replica"] == (0, 1)
            assert error(rank["rollouts"], directory) < NEAR
            assert rank["job"] in rank["memory"]
            assert rank["plain_method"] == "env://", "what vLLM would name the memory after, in every job"
        assert [r.tokens for r in all_rollouts(answers[0]["rollouts"])] == [
            r.tokens for r in all_rollouts(answers[1]["rollouts"])
        ]
    assert two_jobs[0][0]["memory"] != two_jobs[1][0]["memory"]
    assert two_jobs[0][0]["memory"] == two_jobs[0][1]["memory"]
