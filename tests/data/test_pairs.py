"""The text that a reward model reads, the corruption of right responses, and the pairs that come of it."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from spark_megatron.data.assistants import Endpoint, Original, OwnSampler, RuleCorruptor
from spark_megatron.data.chat_model import ChatModel, ChatModelError
from spark_megatron.data.pairs import Pair, make_pairs, originals
from spark_megatron.data.verify_text import verify_text
from spark_megatron.rewards.math import MathVerifier
from spark_megatron.types import Group, Rollout, Task, Verdict
from tests.data.chat_server import server

TASK = Task("t", "solve", "Solve: 6 + 5", "11", "math", "6 + 5")
RIGHT = Original(TASK, " 11 \\boxed{ 11}")


def check(items: Sequence[tuple[Task, str]]) -> list[Verdict]:
    return [MathVerifier(symbolic=None)(task, text, "stop") for task, text in items]


def no_policy(tasks: Sequence[Task], **_how: Any) -> list[str | None]:
    raise AssertionError("nobody asks the policy")


def test_the_text_of_the_release() -> None:
    assert verify_text("1+1?", "2", "It is 2.") == (
        "<question>1+1?</question>\n<reference_answer>2</reference_answer>\n<completion>It is 2.</completion>"
    )


@pytest.mark.parametrize(("length", "kept"), [(1500, 1500), (1501, 1500), (4000, 1500)])
def test_long_references_and_completions_keep_500_and_1000_characters(length: int, kept: int) -> None:
    long = "".join(chr(0x4E00 + i) for i in range(length))
    text = verify_text(long, long, long)
    expected = long if length <= 1500 else long[:500] + long[-1000:]
    assert len(expected) == kept
    assert f"<question>{long}</question>" in text
    assert f"<reference_answer>{expected}</reference_answer>" in text
    assert f"<completion>{expected}</completion>" in text


def test_the_first_right_rollout_is_the_positive() -> None:
    """Not an unparsed one, a partly right one or one whose check did not end; a prompt without one makes none."""
    verdicts = [Verdict("unparsed"), Verdict("ok", 0.5), Verdict("timeout"), Verdict("ok", 1.0), Verdict("ok", 1.0)]
    rollouts = tuple(Rollout((1,), (0.0,), f"text {i}", "stop", 0) for i in range(5))
    groups = [Group(TASK, (1,), rollouts, tuple(verdicts)), Group(TASK, (1,), rollouts[:3], tuple(verdicts[:3]))]
    assert originals(groups) == [Original(TASK, "text 3")]


class Script:
    """An assistant that says one thing after the other, and what it was asked."""

    def __init__(self, *rounds: list[str | None]) -> None:
        self.rounds, self.asked = list(rounds), []

    def __call__(self, given: Sequence[Original], seed: tuple[object, ...], ask: Any) -> list[str | None]:
        self.asked.append(([o.task.id for o in given], seed))
        return self.rounds[len(self.asked) - 1]


def test_a_negative_must_be_refuted_against_the_gold_answer() -> None:
    """Unreadable, still right in another form, not answered: asked again, and after three times left out."""
    tasks = [Task(str(i), "solve", "p", gold, "math", "q") for i, gold in enumerate(["11", "0.5", "3", "4"])]
    given = [Original(task, f"\\boxed{{{task.answer}}}") for task in tasks]
    script = Script(
        ["\\boxed{12}", "\\boxed{0.50}", "I do not know", None],
        ["\\boxed{.5}", "\\boxed{3}", "\\boxed{5}"],
        ["\\boxed{0.5}", "\\boxed{33}"],
    )
    pairs = make_pairs(given, script, check, no_policy, tries=3, seed=(1, "pairs"))
    assert [(pair.task.id, pair.wrong) for pair in pairs] == [
        ("0", "\\boxed{12}"),
        ("2", "\\boxed{33}"),
        ("3", "\\boxed{5}"),
    ]
    assert script.asked == [
        (["0", "1", "2", "3"], (1, "pairs", 0)),
        (["1", "2", "3"], (1, "pairs", 1)),
        (["1", "2"], (1, "pairs", 2)),
    ]


def test_fewer_tries_leave_more_out() -> None:
    assert make_pairs([RIGHT], Script(["?"], ["\\boxed{1}"]), check, no_policy, tries=1, seed=()) == []


def test_the_rule_based_corruption_changes_the_answer_throughout() -> None:
    texts = RuleCorruptor()([Original(TASK, " 6 11 110 1.11 \\boxed{ 11}")], ("s",), no_policy)
    [pair] = make_pairs([RIGHT], RuleCorruptor(), check, no_policy, tries=3, seed=("s",))
    assert texts[0] is not None
    wrong = texts[0].split("{ ")[1][:-1]
    assert wrong != "11"
    assert texts[0] == f" 6 {wrong} 110 1.11 \\boxed{{ {wrong}}}"
    assert pair == Pair(TASK, RIGHT.text, pair.wrong)


def test_the_rule_based_corruption_is_the_same_for_the_same_seed() -> None:
    def texts(seed: int) -> list[str | None]:
        return RuleCorruptor()(
            [Original(Task(str(i), "solve", "", "7", "math", ""), "\\boxed{7}") for i in range(20)], (seed,), no_policy
        )

    assert texts(0) == texts(0) != texts(1)
    assert len(set(texts(0))) > 3


def test_an_answer_in_words_has_no_rule_based_corruption() -> None:
    assert RuleCorruptor()([Original(TASK, "\\boxed{blue}"), Original(TASK, "no box")], (), no_policy) == [None, None]


def test_the_policy_is_asked_with_the_instruction() -> None:
    seen: dict[str, Any] = {}

    def ask(tasks: Sequence[Task], **how: Any) -> list[str | None]:
        seen.update(tasks=list(tasks), **how)
        return ["\\boxed{4}"]

    own = OwnSampler(instruction="Spoil {response} of {question}", temperature=0.7, max_new_tokens=9)
    assert own([RIGHT], ("x",), ask) == ["\\boxed{4}"]
    [task] = seen.pop("tasks")
    assert task.prompt == "Spoil  11 \\boxed{ 11} of 6 + 5"
    assert (task.source, task.verifier) == ("t", "math")
    assert seen == {"temperature": 0.7, "max_new_tokens": 9, "seed": ("x",)}


@pytest.mark.parametrize("missing", ["{question}", "{response}"])
def test_an_instruction_without_a_field_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        OwnSampler(instruction="{question} {response}".replace(missing, ""), temperature=1.0, max_new_tokens=9)


def endpoint(url: str, message: str = "{question}|{response}", **changes: Any) -> Endpoint:
    settings: dict[str, Any] = {
        "model": "m", "system": "Spoil it.", "temperature": 0.7, "concurrency": 4, "retries": 2, "timeout_seconds": 5.0,
        "key_variable": None,
    }  # fmt: skip
    return Endpoint(chat_model=ChatModel(url=url, **settings | changes), message=message, extra_tokens=500)


def test_an_endpoint_gets_the_question_and_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    with server(lambda body, _: (200, "\\boxed{4}")) as (url, requests, _opened):
        assert endpoint(url, key_variable="SOME_KEY")([RIGHT], (), no_policy) == ["\\boxed{4}"]
    [request] = requests
    assert request["messages"] == [
        {"role": "system", "content": "Spoil it."},
        {"role": "user", "content": "6 + 5| 11 \\boxed{ 11}"},
    ]
    assert (request["temperature"], request["max_tokens"], request["model"]) == (0.7, 503, "m")
    assert (request["key"], request["path"]) == ("Bearer secret", "/v1/chat/completions")


def test_replies_keep_their_order_with_no_more_open_than_allowed() -> None:
    def echo(body: dict[str, Any], number: int) -> tuple[int, str]:
        time.sleep(0.05 if number % 2 else 0.0)
        return 200, body["messages"][1]["content"].split("|")[1]

    many = [Original(TASK, f"text {i}") for i in range(20)]
    with server(echo) as (url, requests, opened):
        assert endpoint(url, concurrency=3)(many, (), no_policy) == [original.text for original in many]
    assert len(requests) == 20
    assert 1 < max(opened) <= 3


def test_requests_that_are_refused_for_now_are_repeated() -> None:
    with server(lambda _, number: (429, "later") if number < 2 else (200, "fine")) as (url, requests, _):
        assert endpoint(url)([RIGHT], (), no_policy) == ["fine"]
    assert len(requests) == 3


def test_a_request_that_fails_is_none_and_all_of_them_an_error() -> None:
    def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
        return (400, "broken") if "bad" in body["messages"][1]["content"] else (200, "fine")

    bad = Original(TASK, "bad")
    with server(answer) as (url, requests, _):
        assert endpoint(url)([bad, RIGHT], (), no_policy) == [None, "fine"]
        with pytest.raises(ChatModelError, match=r"none of 2 requests to http://127.*broken"):
            endpoint(url)([bad, bad], (), no_policy)
    assert len(requests) == 4  # what is wrong with a request does not pass by itself


def test_a_request_without_an_answer_in_time_fails() -> None:
    def slow(body: dict[str, Any], number: int) -> tuple[int, str]:
        time.sleep(0.5)
        return 200, "late"

    with server(slow) as (url, requests, _), pytest.raises(ChatModelError, match="timed out"):
        endpoint(url, timeout_seconds=0.05, retries=0)([RIGHT], (), no_policy)
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"retries": -1}, "retries=-1"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0"),
        ({"key_variable": "NO_SUCH_KEY"}, "key_variable=NO_SUCH_KEY"),
        ({"message": "{question}"}, r"message='\{question\}'"),
    ],
)
def test_settings_of_an_endpoint_that_cannot_work_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        endpoint("http://127.0.0.1:1/v1", **changes)
