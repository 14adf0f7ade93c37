"""Figures of judging against values worked out by hand."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from spark_megatron.recycle.judging import BINS, covering, judge_figures, judge_sums, verdict_probability
from spark_megatron.types import Group, Rollout, Task, TaskKind, Verdict


def decode(tokens: Sequence[int]) -> str:
    """One character per token."""
    return "".join(map(chr, tokens))


def rollout(text: str, probabilities: dict[str, float] | None = None) -> Rollout:
    """A rollout of one token per character, each with probability 1 but for those of the last ``probabilities``."""
    logprobs = [0.0] * len(text)
    for piece, p in (probabilities or {}).items():
        begin = text.rindex(piece)
        for i in range(begin, begin + len(piece)):
            logprobs[i] = math.log(p) / len(piece)
    return Rollout(tuple(map(ord, text)), tuple(logprobs), text, "stop", 0)


def judged(
    kind: TaskKind, gold: str, *said: str | None, p: float = 1.0, labels: Sequence[str] = (), **task: object
) -> Group:
    """A group whose verdicts are as given; None is one that could not be read. Each has probability ``p``."""
    labels = tuple(labels) or (("Yes", "No") if kind == "judge_one" else ("A", "B"))
    fields = {"id": "t", "prompt": "p", "verifier": "choice", "question": "q", "source": "s", **task}
    verdicts = tuple(Verdict("unparsed") if s is None else Verdict("ok", float(s == gold), s) for s in said)
    texts = [rollout("?") if s is None else rollout(f"I say \\boxed{{{s}}}.", {s: p}) for s in said]
    return Group(Task(kind=kind, answer=gold, labels=labels, **fields), (1,), tuple(texts), verdicts)  # type: ignore[arg-type]


def figures(*groups: Group, decoded: bool = True) -> dict[str, float]:
    return judge_figures(judge_sums(groups, decode if decoded else None))


def test_rates_of_single_judgements_by_hand() -> None:
    found = figures(judged("judge_one", "Yes", "Yes", "Yes", "No", None), judged("judge_one", "No", "Yes", "No"))
    assert found["judge_one/failure_rate"] == 1 / 6
    assert found["judge_one/yes_rate"] == 3 / 5
    assert found["judge_one/accuracy_right"] == 2 / 4
    assert found["judge_one/accuracy_wrong"] == 1 / 2
    assert not [name for name in found if name.startswith("judge_pair")]


def test_yes_is_what_the_task_means_by_it() -> None:
    """In some wordings the letter A says that the answer is wrong."""
    found = figures(judged("judge_one", "B", "B", "B", "B", "A", labels=("B", "A")))
    assert found["judge_one/yes_rate"] == 0.75
    assert found["judge_one/accuracy_right"] == 0.75
    assert "judge_one/accuracy_wrong" not in found


def test_a_judge_that_always_takes_the_first() -> None:
    found = figures(judged("judge_pair", "A", "A", "A"), judged("judge_pair", "B", "A", "A", None))
    assert found["judge_pair/a_rate"] == 1.0
    assert (found["judge_pair/accuracy_first"], found["judge_pair/accuracy_second"]) == (1.0, 0.0)
    assert found["judge_pair/position_bias"] == 1.0
    assert found["judge_pair/failure_rate"] == 1 / 5


def test_position_bias_by_hand() -> None:
    found = figures(judged("judge_pair", "A", "A", "A", "A", "B"), judged("judge_pair", "B", "B", "B", "A", None))
    assert found["judge_pair/a_rate"] == 4 / 7
    assert found["judge_pair/position_bias"] == pytest.approx(3 / 4 - 2 / 3)
    assert found["judge_pair/accuracy_second"] == 2 / 4
    second = figures(judged("judge_pair", "A", "B"), judged("judge_pair", "B", "B"))
    assert second["judge_pair/position_bias"] == -1.0
    assert "judge_pair/position_bias" not in figures(judged("judge_pair", "A", "A"))


def both_orders(first: Sequence[str | None], second: Sequence[str | None], source: str = "s") -> list[Group]:
    """The verdicts on (8, 9), of which 8 is right, and on (9, 8)."""
    return [
        judged("judge_pair", "A", *first, source=source, shown=("8", "9")),
        judged("judge_pair", "B", *second, source=source, shown=("9", "8")),
    ]


@pytest.mark.parametrize(
    ("first", "second", "consistency"),
    [
        (["A", "A"], ["B", "B"], 1.0),
        (["B", "B"], ["A", "A"], 1.0),  # wrong, but it stays with its choice
        (["A", "A"], ["A", "A"], 0.0),
        (["B"], ["B"], 0.0),
        (["A", "B"], ["A", "B"], 0.5),
        (["A", "A", "A", "B"], ["B", "A"], 0.75 * 0.5 + 0.25 * 0.5),
        (["A", "A", "A", "B"], ["B", "B", "B", "A", None], 0.75 * 0.75 + 0.25 * 0.25),
    ],
)
def test_swap_consistency_by_hand(first: list[str], second: list[str], consistency: float) -> None:
    assert figures(*both_orders(first, second))["judge_pair/swap_consistency"] == pytest.approx(consistency)


def test_swap_consistency_is_a_mean_over_pairs_with_both_orders() -> None:
    groups = (
        both_orders(["A"], ["B"], "one") + both_orders(["A"], ["A"], "two") + both_orders(["A", "B"], ["B"], "three")
    )
    groups += both_orders(["A"], [None], "unread") + [judged("judge_pair", "A", "A", source="single", shown=("8", "9"))]
    assert figures(*groups)["judge_pair/swap_consistency"] == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    assert "judge_pair/swap_consistency" not in figures(groups[-1])


def test_brier_and_calibration_by_hand() -> None:
    """p(yes) = 0.9 (right), 0.9 (wrong), 1 - 0.8 = 0.2 (wrong): two cells."""
    found = figures(
        judged("judge_one", "Yes", "Yes", p=0.9),
        judged("judge_one", "No", "Yes", p=0.9),
        judged("judge_one", "No", "No", p=0.8),
    )
    assert found["judge_one/brier"] == pytest.approx((0.1**2 + 0.9**2 + 0.2**2) / 3)
    assert found["judge_one/ece"] == pytest.approx(2 / 3 * abs(0.9 - 0.5) + 1 / 3 * abs(0.2 - 0.0))
    assert found["judge_one/calibrated_share"] == 1.0


def test_a_judge_that_is_as_sure_as_it_should_be() -> None:
    groups = [judged("judge_pair", "A", *["A"] * 3, p=0.75), judged("judge_pair", "B", "A", p=0.75)]
    found = figures(*groups)
    assert found["judge_pair/ece"] == pytest.approx(0.0)
    assert found["judge_pair/brier"] == pytest.approx((3 * 0.25**2 + 0.75**2) / 4)


def test_certainty_lies_in_the_last_cell() -> None:
    sums = judge_sums([judged("judge_one", "Yes", "Yes", "No")], decode)
    assert (sums[f"judge_one/bin{BINS - 1}/count"], sums["judge_one/bin0/count"]) == (1, 1)
    assert judge_figures(sums)["judge_one/ece"] == pytest.approx(0.5)


def test_nothing_is_made_up_without_probabilities() -> None:
    group = judged("judge_one", "Yes", "Yes", p=0.5)
    assert not {"judge_one/brier", "judge_one/ece"} & set(figures(group, decoded=False))
    unknown = Group(
        group.task,
        (1,),
        (Rollout(group.rollouts[0].tokens, (math.nan,) * 99, group.rollouts[0].text, "stop", 0),),
        group.verdicts,
    )
    found = figures(unknown)
    assert "judge_one/brier" not in found
    assert "judge_one/calibrated_share" not in found
    assert found["judge_one/accuracy_right"] == 1.0


def test_sums_add_up_over_groups_and_ranks() -> None:
    groups = [judged("judge_one", "Yes", "Yes", "No", p=0.7), judged("judge_one", "No", None, "No", p=0.6)]
    groups += [judged("judge_pair", "A", "A", "B", p=0.9), *both_orders(["A"], ["A"])]
    added: Counter[str] = Counter()
    for part in (groups[:1], groups[1:3], groups[3:], []):
        added.update(judge_sums(part, decode))
    assert judge_figures(added) == pytest.approx(figures(*groups))
    assert judge_sums([], decode).keys() == judge_sums(groups, decode).keys()
    assert judge_figures(judge_sums([], decode)) == {}


def test_other_tasks_do_not_count() -> None:
    solve = Group(Task("t", "solve", "p", "8", "math", "q"), (1,), (rollout("8"),), (Verdict("ok", 1.0, "8"),))
    assert figures(solve) == {}
    assert figures(judged("judge_one", "Yes", "Yes")) == figures(solve, judged("judge_one", "Yes", "Yes"))


def test_probability_of_the_verdict_alone() -> None:
    """Of the last one, over all its tokens, whatever came before and behind it."""
    made = rollout("No? \\boxed{No} or \\boxed{Yes}!", {"Yes": 0.3, "No": 0.2, "!": 0.1})
    assert verdict_probability(made, "Yes", decode) == pytest.approx(0.3)
    assert verdict_probability(made, "B", decode) is None


@pytest.mark.parametrize(
    "pieces", [["\\", "box", "ed{", "Yes", "}"], ["é", "\\boxed", "{Y", "es}", "."], ["\\boxed{Yes}"]]
)
def test_tokens_that_cover_the_verdict(pieces: list[str]) -> None:
    text = "".join(pieces)
    begin = text.index("Yes")
    found = covering(range(len(pieces)), text, (begin, begin + 3), lambda tokens: "".join(pieces[t] for t in tokens))
    assert found is not None
    spelled = "".join(pieces[i] for i in found)
    assert "Yes" in spelled
    assert all("Yes" not in "".join(pieces[i] for i in part) for part in (found[1:], found[:-1]))


def test_bytes_of_a_character_may_be_spread_over_tokens() -> None:
    text = "日本 \\boxed{Yes} 日"
    found = covering(text.encode(), text, (10, 13), lambda tokens: bytes(tokens).decode(errors="replace"))
    assert found is not None
    assert bytes(text.encode()[i] for i in found) == b"Yes"


def test_a_text_that_the_tokens_do_not_spell_has_no_place() -> None:
    assert covering([1, 2], "\\boxed{Yes}", (7, 10), lambda tokens: "x" * len(tokens)) is None
    assert covering([], "\\boxed{Yes}", (7, 10), decode) is None
