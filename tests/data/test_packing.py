import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spark_megatron.data.chat import encode_prompt, encode_response
from spark_megatron.data.packing import (
    deal,
    imbalance,
    kl_token_count,
    lengths_of,
    pack,
    partition,
    split_updates,
    token_counts,
)
from spark_megatron.data.samples import supervised_samples, to_samples
from spark_megatron.types import Group, Rollout, Sample, Task, TaskKind

COMPONENTS: dict[TaskKind, str] = {
    "solve": "policy",
    "judge_one": "pointwise",
    "judge_pair": "pairwise",
    "reflect": "reflection",
}
WORDS = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "Question", "6", "5", "8", "yes"]
TASK = Task("t1", "solve", "Question 6 5", "8", "math", "6 5")


def tokenizer(template: str | None = "{{ bos_token }}<user> {{ messages[0].content }} </s>") -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    made.chat_template = template and template + "{% if add_generation_prompt %} <assistant> {% endif %}"
    return made


def names(ids: tuple[int, ...]) -> list[str]:
    return [WORDS[i] for i in ids]


def test_prompt_is_one_user_turn_up_to_the_assistant() -> None:
    ids = encode_prompt(tokenizer(), TASK)
    assert isinstance(ids, tuple)
    assert all(type(token) is int for token in ids)
    assert names(ids) == ["<s>", "<user>", "Question", "6", "5", "</s>", "<assistant>"]


def test_prompt_needs_a_chat_template() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tokenizer(None), TASK)


def test_response_ends_with_one_end_token() -> None:
    assert names(encode_response(tokenizer(), "6 8")) == ["6", "8", "</s>"]
    assert names(encode_response(tokenizer(), "6 8 </s>")) == ["6", "8", "</s>"]
    without = tokenizer()
    without.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        encode_response(without, "6")


def group(kind: TaskKind, *responses: tuple[int, ...]) -> Group:
    rollouts = tuple(Rollout(r, tuple(-0.1 * t for t in r), "text", "stop", 4) for r in responses)
    return Group(replace(TASK, kind=kind), (9, 9), rollouts)


def test_samples_of_groups() -> None:
    groups = [group("solve", (1, 2), (3,), (4,), ()), group("judge_pair", (5,), (6,)), group("reflect", (7,), (8,))]
    advantages: list[list[float | None]] = [[1.0, None, 0.0, -1.0], [0.0, None], [-0.5, 0.5]]
    samples = to_samples(groups, advantages, COMPONENTS)
    first = Sample((9, 9), (1, 2), "policy", "policy_gradient", 1.0, (-0.1, -0.2), 4)
    # A zero advantage in a group with signal stays: it still counts as tokens and for the KL term.
    assert samples == [
        first,
        replace(first, response=(4,), advantage=0.0, rollout_logprobs=(-0.4,)),
        replace(first, response=(7,), component="reflection", advantage=-0.5, rollout_logprobs=(-0.7000000000000001,)),
        replace(first, response=(8,), component="reflection", advantage=0.5, rollout_logprobs=(-0.8,)),
    ]


def test_samples_need_one_advantage_per_rollout() -> None:
    with pytest.raises(ValueError, match="t1: 2 rollouts but 1 advantages"):
        to_samples([group("solve", (1,), (2,))], [[1.0]], COMPONENTS)
    with pytest.raises(ValueError, match="zip"):
        to_samples([group("solve", (1,))], [], COMPONENTS)


def test_supervised_samples() -> None:
    (sample,) = supervised_samples([(replace(TASK, kind="judge_one"), "yes")], tokenizer(), COMPONENTS)
    assert names(sample.prompt)[-1] == "<assistant>"
    assert names(sample.response) == ["yes", "</s>"]
    assert (sample.component, sample.loss, sample.rollout_logprobs) == ("pointwise", "cross_entropy", ())


SAMPLED = Sample((11, 12), (13, 14, 15), "policy", "policy_gradient", 0.5, (-1.0, -2.0, -3.0), 1)
TAUGHT = Sample((21,), (22,), "pairwise", "cross_entropy")


def test_layout_of_a_batch() -> None:
    """Two sequences one behind the other; the last position of each predicts nothing."""
    batch = pack([SAMPLED, TAUGHT], {"policy": 0.25, "pairwise": 0.1}, 10)
    nan = math.nan
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.tokens.tolist() == [11, 12, 13, 14, 15, 21, 22]
    assert batch.labels.tolist() == [12, 13, 14, 15, 0, 22, 0]
    torch.testing.assert_close(batch.weight, torch.tensor([0, 0.25, 0.25, 0.25, 0, 0.1, 0]))
    torch.testing.assert_close(batch.kl_weight, torch.tensor([0, 0.1, 0.1, 0.1, 0, 0, 0]))
    torch.testing.assert_close(batch.advantage, torch.tensor([0, 0.5, 0.5, 0.5, 0, 0, 0]))
    assert batch.supervised.tolist() == [False] * 5 + [True, False]
    expected = torch.tensor([nan, -1.0, -2.0, -3.0, nan, nan, nan])
    torch.testing.assert_close(batch.rollout_logprobs, expected, equal_nan=True)
    assert batch.weight_version.tolist() == [-1, 1, 1, 1, -1, -1, -1]
    assert batch.trained.tolist() == [False, True, True, True, False, True, False]
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32


def random_samples(count: int, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        prompt = tuple(rng.randrange(1, 90) for _ in range(rng.randrange(1, 9)))
        response = tuple(rng.randrange(1, 90) for _ in range(rng.randrange(1, 30)))
        if index % 3:
            logprobs = tuple(-rng.random() for _ in response)
            samples.append(Sample(prompt, response, "policy", "policy_gradient", rng.gauss(0, 1), logprobs))
        else:
            samples.append(Sample(prompt, response, "pointwise", "cross_entropy"))
    return samples


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 40, 64, 200, 10_000])
def test_any_cut_keeps_every_token_and_the_loss(max_tokens: int, ranks: int) -> None:
    samples = random_samples(40)
    counts, kl_count = token_counts(samples), kl_token_count(samples)
    weights = {"policy": 0.7 / counts["policy"], "pointwise": 0.3 / counts["pointwise"]}
    plan = partition(lengths_of(samples), max_tokens, ranks)
    parts = [rows for mine in plan for rows in mine]
    assert sorted(row for rows in parts for row in rows) == list(range(40))
    batches = [pack([samples[row] for row in rows], weights, kl_count) for rows in parts]
    for rows, batch in zip(parts, batches, strict=True):
        assert len(batch.tokens) <= max_tokens or len(rows) <= 1
    # The loss of a token is a function of its label, so the oracle needs no batches.
    token_loss = torch.linspace(0.0, 1.0, 90)
    loss = sum(float((batch.weight.double() * token_loss[batch.labels]).sum()) for batch in batches)
    oracle = sum(weights[s.component] * sum(float(token_loss[t]) for t in s.response) for s in samples)
    assert loss == pytest.approx(oracle, rel=1e-5)
    assert sum(float(batch.weight.sum()) for batch in batches) == pytest.approx(1.0, rel=1e-5)
    assert sum(float(batch.kl_weight.sum()) for batch in batches) == pytest.approx(1.0, rel=1e-5)


@given(
    lengths=st.lists(st.integers(1, 500), max_size=60),
    max_tokens=st.integers(1, 2000),
    ranks=st.integers(1, 5),
)
def test_every_rank_gets_as_many_microbatches_and_nearly_the_same_work(
    lengths: list[int], max_tokens: int, ranks: int
) -> None:
    plan = partition(lengths, max_tokens, ranks)
    assert len({len(mine) for mine in plan}) == 1
    parts = [rows for mine in plan for rows in mine]
    assert sorted(row for rows in parts for row in rows) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in rows) for rows in parts]
    assert all(size <= max_tokens or len(rows) == 1 for size, rows in zip(sizes, parts, strict=True))
    # Dealing longest first leaves no micro-batch more than one row above any other that has a row to give.
    assert max(sizes) - min(sizes) <= max(lengths, default=0)
    work = [sum(lengths[row] for rows in mine for row in rows) for mine in plan]
    assert max(work) - min(work) <= max(lengths, default=0)
    if lengths:
        assert imbalance(lengths, plan) == pytest.approx(max(work) * ranks / sum(work))


def test_the_spread_of_work_of_many_ragged_rows_is_small() -> None:
    """Rows of 10 to 400 tokens on 8 ranks: the busiest rank has less than half a per cent more than the mean."""
    rng = random.Random(3)
    lengths = [rng.randrange(10, 400) for _ in range(512)]
    plan = partition(lengths, 4096, 8)
    assert 1 <= imbalance(lengths, plan) < 1.005
    assert len(plan[0]) == -(-sum(lengths) // (8 * 4096))
    assert imbalance([], partition([], 10, 4)) == 1.0


def test_dealing_gives_the_costliest_to_the_least_full() -> None:
    assert deal([1.5, 9.0, 3.0, 5.0, 4.0], 2) == [[1, 2], [3, 4, 0]]
    assert deal([2.0, 2.0, 2.0], 2) == [[0, 2], [1]]
    assert deal([], 2) == [[], []]
    assert deal([7.0], 3) == [[0], [], []]


def test_weights_of_the_whole_step_are_used_as_they_are() -> None:
    batch = pack([SAMPLED], {"policy": 1 / 30}, 60)
    assert float(batch.weight.sum()) == pytest.approx(0.1)
    assert float(batch.kl_weight.sum()) == pytest.approx(0.05)


def test_zero_weight_leaves_the_kl_term() -> None:
    batch = pack([SAMPLED], {"policy": 0.0}, 3)
    assert not batch.weight.any()
    assert int(batch.trained.sum()) == 3


def test_no_samples_give_one_sequence_of_zero_weight() -> None:
    batch = pack([], {}, 0)
    assert batch.tokens.tolist() == batch.labels.tolist() == [0, 0]
    assert batch.cu_seqlens.tolist() == [0, 2]
    assert not batch.trained.any()
    assert not batch.supervised.any()
    assert batch.rollout_logprobs.isnan().all()


@pytest.mark.parametrize(
    ("samples", "weights", "kl_count", "message"),
    [
        ([SAMPLED], {}, 3, r"components \['policy'\]; there are weights for \[\]"),
        ([SAMPLED, TAUGHT], {"policy": 1.0}, 3, r"components \['pairwise'\]; there are weights for \['policy'\]"),
        ([SAMPLED], {"policy": 1.0}, 2, "kl_count=2: below the 3"),
        ([replace(SAMPLED, prompt=())], {"policy": 1.0}, 3, "0 prompt and 3 response tokens"),
        ([replace(SAMPLED, rollout_logprobs=(-1.0,))], {"policy": 1.0}, 3, "1 log-probs for 3"),
    ],
)
def test_contradictions_are_refused(
    samples: list[Sample], weights: dict[str, float], kl_count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(samples, weights, kl_count)


@pytest.mark.parametrize(("max_tokens", "ranks"), [(0, 1), (8, 0)])
def test_a_partition_needs_room_and_ranks(max_tokens: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens={max_tokens} and ranks={ranks}"):
        partition([3], max_tokens, ranks)


def test_counts() -> None:
    assert token_counts([SAMPLED, SAMPLED, TAUGHT]) == {"policy": 6, "pairwise": 1}
    assert kl_token_count([SAMPLED, SAMPLED, TAUGHT]) == 6
    assert token_counts([]) == {}
    assert kl_token_count([]) == 0


def test_updates_are_nearly_equal_shuffled_parts() -> None:
    samples = random_samples(23)
    parts = split_updates(samples, 4, random.Random(0))
    assert [len(part) for part in parts] == [6, 6, 6, 5]
    together = [sample for part in parts for sample in part]
    assert together != samples
    assert sorted(map(repr, together)) == sorted(map(repr, samples))
    assert parts == split_updates(samples, 4, random.Random(0))
    assert [len(part) for part in split_updates(samples[:2], 3, random.Random(0))] == [1, 1, 0]
    with pytest.raises(ValueError, match="k=0"):
        split_updates(samples, 0, random.Random(0))
