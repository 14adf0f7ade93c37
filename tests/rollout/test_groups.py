"""Sampling groups on one and on two samplers gives the same groups."""

import hashlib
import itertools
import math
from typing import Any

import pytest

from spark_megatron.rollout.groups import request_seed
from spark_megatron.types import Group, Task
from tests import distributed

TASKS = [Task(f"t{i}", "solve", f"What is {i % 5} + 1?", str(i % 5 + 1), "math", f"{i % 5} + 1") for i in range(7)]
"""t0 and t5 have the same prompt, as have t1 and t6."""

Facts = list[tuple[Any, ...]]


def facts(groups: list[Group]) -> Facts:
    """Everything of the groups but the log-probs, which are NaN here and so never equal."""
    return [
        (g.task, g.prompt_tokens, g.verdicts, [(r.tokens, r.text, r.finish, r.weight_version) for r in g.rollouts])
        for g in groups
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    """The groups of all tasks from a single sampler."""
    folder = tmp_path_factory.mktemp("alone") / "job"
    return distributed.run(1, "tests.rollout.ranks_groups:groups", folder, tasks=TASKS, counts=[7])[0][7]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, list[Group]]]:
    """Of two ranks with a sampler each: the groups of all tasks, and of the first task alone."""
    folder = tmp_path_factory.mktemp("pair") / "job"
    return distributed.run(2, "tests.rollout.ranks_groups:groups", folder, tasks=TASKS, counts=[7, 1])


def test_groups_do_not_depend_on_the_number_of_samplers(alone: list[Group], pair: list[dict[int, list[Group]]]) -> None:
    for rank in pair:
        assert facts(rank[7]) == facts(alone)
        assert facts(rank[1]) == facts(alone)[:1], "one of the two samplers had nothing to do"


def test_groups_are_complete_and_in_order(pair: list[dict[int, list[Group]]]) -> None:
    groups = pair[0][7]
    assert [g.task for g in groups] == TASKS
    for group in groups:
        assert len(group.rollouts) == len(group.verdicts) == 4
        assert group.rewards == tuple(float(r.text.split()[1]) / 50 for r in group.rollouts)
        assert {r.weight_version for r in group.rollouts} == {5}
        assert all(math.isnan(value) for r in group.rollouts for value in r.logprobs)
        assert all(len(r.logprobs) == len(r.tokens) and r.tokens[-1] == 1 for r in group.rollouts)


def test_equal_prompts_at_different_positions_are_sampled_differently(alone: list[Group]) -> None:
    for a, b in ((0, 5), (1, 6)):
        assert alone[a].prompt_tokens == alone[b].prompt_tokens
        assert [r.text for r in alone[a].rollouts] != [r.text for r in alone[b].rollouts]


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
