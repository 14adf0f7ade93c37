"""Sampling groups on one, two and four samplers gives the same groups."""

import hashlib
import itertools
import math
from pathlib import Path

import pytest
import torch

from spark_megatron import runtime
from spark_megatron.data.samples import to_samples
from spark_megatron.rollout.groups import phase_metrics, request_seed
from spark_megatron.rollout.lengths import ResponseLengths
from spark_megatron.types import Group, Rollout, Task
from tests import distributed, tiny_models
from tests.conftest import ModelDirectory
from tests.rollout.ranks_groups import STOPS, Answers, byte_tokenizer

TASKS = [Task(f"t{i}", "solve", f"What is {i % 5} + 1?", str(i % 5 + 1), "math", f"{i % 5} + 1") for i in range(7)]
"""t0 and t5 have the same prompt, as have t1 and t6."""

Facts = list[tuple[object, ...]]


def facts(groups: list[Group]) -> Facts:
    """Everything of the groups but the log-probs, which are NaN or differ by rounding."""
    return [
        (g.task, g.prompt_tokens, g.verdicts, [(r.tokens, r.text, r.finish, r.weight_version) for r in g.rollouts])
        for g in groups
    ]


@pytest.fixture(scope="module")
def path(model_directory: ModelDirectory) -> Path:
    return model_directory("qwen2")


@pytest.fixture(scope="module")
def answers(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Answers]]:
    """Of each rank, by the number of ranks."""
    root = tmp_path_factory.mktemp("groups")
    job = "tests.rollout.ranks_groups:everything"
    return {ranks: distributed.run(ranks, job, root / str(ranks), tasks=TASKS, path=path) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_do_not_depend_on_the_number_of_samplers(ranks: int, answers: dict[int, list[Answers]]) -> None:
    [alone] = answers[1]
    for rank in answers[ranks]:
        assert facts(rank.all_tasks.groups) == facts(alone.all_tasks.groups)
        assert facts(rank.one_task.groups) == facts(alone.all_tasks.groups)[:1], "most samplers had nothing to do"
        assert rank.nothing.groups == []
        assert len(rank.all_tasks.tokens) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_samples_of_a_model_do_not_depend_on_the_number_of_samplers(
    ranks: int, answers: dict[int, list[Answers]], path: Path
) -> None:
    """Tokens are equal; log-probs only up to rounding, since the number of ranks decides what shares a batch."""
    [alone] = answers[1]
    model = tiny_models.load(path)
    for rank in answers[ranks]:
        assert facts(rank.model.groups) == facts(alone.model.groups)
    for group in answers[ranks][0].model.groups:
        for rollout in group.rollouts:
            expected = tiny_models.response_logprobs(model, group.prompt_tokens, rollout.tokens, 1.0)
            assert (expected - torch.tensor(rollout.logprobs)).abs().max() < 1e-4


def test_what_was_sampled_is_learned_from_as_it_is(answers: dict[int, list[Answers]]) -> None:
    """Ids go in and out. Most of these responses are no text: encoding what they decode to would give others."""
    tokenizer = byte_tokenizer()
    groups = answers[2][0].model.groups
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    again = [tuple(tokenizer.encode(rollout.text, add_special_tokens=False)) for rollout in rollouts]
    assert sum(a != r.tokens for a, r in zip(again, rollouts, strict=True)) > len(rollouts) / 2
    samples = to_samples(groups, [[1.0] * 4] * len(groups), {"solve": "policy"})
    assert [sample.response for sample in samples] == [rollout.tokens for rollout in rollouts]
    assert [sample.prompt for sample in samples[::4]] == [group.prompt_tokens for group in groups]


def test_samples_of_a_prompt_are_distinct_and_end_early_or_late(answers: dict[int, list[Answers]]) -> None:
    groups = answers[1][0].model.groups
    assert all(len({rollout.tokens for rollout in group.rollouts}) == 4 for group in groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert (rollout.tokens[-1] in STOPS) == (rollout.finish == "stop")
        assert not set(rollout.tokens[:-1]) & set(STOPS)
        assert len(rollout.tokens) == 24 or rollout.finish == "stop"


def test_groups_are_complete_and_in_order(answers: dict[int, list[Answers]]) -> None:
    groups = answers[2][0].all_tasks.groups
    assert [g.task for g in groups] == TASKS
    for group in groups:
        assert len(group.rollouts) == len(group.verdicts) == 4
        assert group.rewards == tuple(float(r.text.split()[1]) / 50 for r in group.rollouts)
        assert {r.weight_version for r in group.rollouts} == {5}
        assert all(math.isnan(value) for r in group.rollouts for value in r.logprobs)
        assert all(len(r.logprobs) == len(r.tokens) and r.tokens[-1] == 1 for r in group.rollouts)


def test_equal_prompts_at_different_positions_are_sampled_differently(answers: dict[int, list[Answers]]) -> None:
    groups = answers[1][0].all_tasks.groups
    for a, b in ((0, 5), (1, 6)):
        assert groups[a].prompt_tokens == groups[b].prompt_tokens
        assert [r.text for r in groups[a].rollouts] != [r.text for r in groups[b].rollouts]


def test_responses_are_cut_off_at_the_limit(answers: dict[int, list[Answers]]) -> None:
    """An answer of one digit takes 9 tokens with its end, one of two digits is 9 without."""
    rollouts = [rollout for group in answers[2][0].cut_off.groups for rollout in group.rollouts]
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert len(rollout.tokens) == len(rollout.logprobs) == 9
        assert len(rollout.text) == (9 if rollout.finish == "length" else 8)


@pytest.mark.parametrize("ranks", [2, 4])
def test_samplers_get_even_shares_once_the_lengths_are_known(ranks: int, answers: dict[int, list[Answers]]) -> None:
    """At first every kind is expected to reach the limit; kinds that alternate then meet on every second sampler."""
    short, long = 9, 24
    for rank in answers[ranks]:
        first, second = rank.uneven
        assert phase_metrics([first])["rollout/imbalance"] == pytest.approx(long * 2 / (long + short))
        assert phase_metrics([second])["rollout/imbalance"] == 1.0
        assert phase_metrics([second, first]) == phase_metrics([first])
        assert facts(first.groups) == facts(second.groups)


def test_a_resumed_run_samples_the_same_on_each_rank(answers: dict[int, list[Answers]]) -> None:
    for rank in answers[2]:
        first, second, resumed = rank.shares
        assert resumed == second != first


def test_expected_lengths_follow_those_seen() -> None:
    def group(*lengths: int) -> Group:
        task = Task("t", "solve", "?", "1", "math", "?")
        return Group(task, (1,), tuple(Rollout((5,) * n, (0.0,) * n, "", "stop", 0) for n in lengths))

    lengths = ResponseLengths()
    assert lengths.expected("solve", 40) == 40
    lengths.observe([group(), group(10, 20), group(30, 20)])
    assert (lengths.expected("solve", 40), lengths.expected("solve", 8)) == (20, 8)
    lengths.observe([group(), group(30)])
    assert (lengths.expected("solve", 40), lengths.expected("reflect", 40)) == (25, 40)
    lengths.observe([group()])
    assert lengths.expected("solve", 40) == 25


def test_a_prompt_without_room_is_left_out_and_counted(answers: dict[int, list[Answers]]) -> None:
    """Of the 128 tokens 24 are for the response and 2 for the template: 103 signs are one too many."""
    [alone] = answers[1]
    for rank in answers[2]:
        phase = rank.without_room
        assert phase.groups[1].rollouts == phase.groups[1].verdicts == ()
        assert len(phase.groups[1].prompt_tokens) == 105
        assert facts(phase.sampled) == facts([g for i, g in enumerate(alone.all_tasks.groups) if i != 1])
        assert phase_metrics([rank.all_tasks, phase, phase])["rollout/too_long"] == 2
    assert phase_metrics([]) == {}


def test_a_phase_without_room_ends_the_run_only_where_tasks_are_original(answers: dict[int, list[Answers]]) -> None:
    told = (
        "rollout.backend.max_model_len=128: none of the 2 prompts of this phase leaves room for max_new_tokens=24, the "
        "shortest has 105 tokens: raise it to 129 or more"
    )
    for rank in answers[2]:
        assert rank.refused == told
        assert rank.none_of_the_recycled.sampled == []
        assert phase_metrics([rank.none_of_the_recycled]) == {"rollout/imbalance": 1.0, "rollout/too_long": 2.0}


@pytest.mark.parametrize("deaf", [False, True])
def test_a_sampler_that_hangs_ends_the_job(deaf: bool, tmp_path: Path) -> None:
    """Rank 1 says what hung, or at least where; rank 0 names the rank that it waited for."""
    job = distributed.start(2, "tests.rollout.ranks_groups:hanging", tmp_path / "job", tasks=TASKS, deaf=deaf)
    codes = [process.wait(timeout=120) for process in job.processes]
    waiting, stuck = ((tmp_path / "job" / f"{rank}.log").read_text() for rank in (0, 1))
    assert codes == [1, 1 if deaf else runtime.HUNG]
    assert ("rank 1: no progress in sampling for 1 s (engine.timeout_s)" in stuck) != deaf
    assert "ranks_groups.py" in stuck
    assert "in generate" in stuck
    assert "RuntimeError: rank 0 was done with sampling and waited in vain for ranks [1]" in waiting


def test_request_seeds_are_48_bits_of_a_hash_of_what_they_are_for() -> None:
    expected = int.from_bytes(hashlib.blake2b(b"(3, 'solve', 0)", digest_size=6).digest(), "big")
    assert request_seed(3, "solve", 0) == expected < 2**48
    assert (
        len({request_seed(*parts) for parts in ((3, "solve", 0), (3, "solve", 1), (3, "reward", 0), (4, "solve", 0))})
        == 4
    )


def test_seeds_of_requests_are_further_apart_than_their_samples() -> None:
    """Sample i of a request has seed + i: 64 samples of 20 000 requests never share one."""
    seeds = sorted(request_seed(0, step, i) for step in range(100) for i in range(200))
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 64
