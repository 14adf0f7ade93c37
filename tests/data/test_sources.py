import json
import random
from pathlib import Path
from typing import Any

import pytest

from spark_megatron.data.curriculum import Shuffled
from spark_megatron.data.reasoning import ReasoningSource
from spark_megatron.data.rows import Files
from spark_megatron.data.sources import TaskSource
from spark_megatron.data.split import is_heldout, question_hash
from spark_megatron.data.stream import TaskStream
from spark_megatron.data.table import TableSource
from spark_megatron.recycle.distractors import near_miss
from spark_megatron.types import Task

CHAIN: dict[str, Any] = {
    "dataset": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    "size": 200,
    "question_from": "expression",
    "instruction": "Question: {question}",
    "system": None,
    "verifier": "math",
}
GSM = [
    {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A hall seats 1,200; 200 are taken. Free?", "answer": "#### is a marker\n#### 1,000"},
    {"question": "Braces {question} and {} stay.", "answer": "none\n####-5 "},
]


def reasoning(**settings: Any) -> ReasoningSource:
    return ReasoningSource(**{**CHAIN, **settings})


def jsonl(path: Path, rows: list[Any], **settings: Any) -> TableSource:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    defaults: dict[str, Any] = {
        "rows": Files(paths=str(path)),
        "question_field": "question",
        "answer_field": "answer",
        "answer_after": "####",
        "instruction": "{question} Box it.",
        "system": None,
        "verifier": "math",
        "max_broken": 0,
    }
    return TableSource(**{**defaults, **settings})


def make_stream(source: TaskSource, **settings: Any) -> TaskStream:
    return TaskStream(**{"source": source, "seed": 0, "heldout_share": 0.0, "order": Shuffled(), **settings})


def evaluate(question: str) -> int:
    first, *rest = question.split()
    signed = zip(rest[::2], rest[1::2], strict=True)
    return int(first) + sum(int(digit) if sign == "+" else -int(digit) for sign, digit in signed)


def test_reasoning_tasks() -> None:
    tasks = reasoning().tasks("key")
    assert 150 < len(tasks) <= 200
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        assert int(task.answer) == evaluate(task.question)
        assert task.prompt == f"Question: {task.question}"
        assert (task.kind, task.verifier, task.source) == ("solve", "math", "")


def test_reasoning_passes_depend_on_the_key_alone() -> None:
    first, second = reasoning().tasks("train/0/0"), reasoning().tasks("train/1/0")
    assert first == reasoning().tasks("train/0/0")
    assert len({t.id for t in first} & {t.id for t in second}) < 60  # neighbours are no shifted copies


def test_reasoning_question_of_the_library() -> None:
    task = reasoning(question_from="question").tasks("key")[0]
    assert task.question.startswith("State the final answer")


def test_reasoning_faults_are_named() -> None:
    with pytest.raises(ValueError, match=r"dataset='chain_sums'.*nearest: 'chain_sum'"):
        reasoning(dataset="chain_sums")
    with pytest.raises(ValueError, match="min_term"):
        reasoning(params={"min_term": 2})
    with pytest.raises(ValueError, match="max_terms must be >= min_terms"):
        reasoning(params={"min_terms": 5, "max_terms": 2})
    with pytest.raises(ValueError, match="leave out seed and size"):
        reasoning(params={"seed": 1})
    with pytest.raises(ValueError, match=r"question_from='formula'.*'expression'"):
        reasoning(question_from="formula").tasks("key")
    with pytest.raises(ValueError, match=r"must contain \{question\}"):
        reasoning(instruction="Solve it")
    with pytest.raises(ValueError, match="size=0"):
        reasoning(size=0)


def test_fingerprint_changes_with_the_settings() -> None:
    assert reasoning().fingerprint == reasoning().fingerprint
    changed = [reasoning(size=100), reasoning(question_from="question"), reasoning(params={"max_terms": 3})]
    assert len({source.fingerprint for source in [reasoning(), *changed]}) == 4


def test_jsonl_tasks(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "gsm.jsonl", [*GSM, "\n", GSM[0]])
    tasks = source.tasks("a")
    answers = {task.question: task.answer for task in tasks}
    assert answers == {GSM[0]["question"]: "7", GSM[1]["question"]: "1,000", GSM[2]["question"]: "-5"}
    assert {task.prompt for task in tasks} >= {"Braces {question} and {} stay. Box it."}


def test_jsonl_passes_are_shuffles(tmp_path: Path) -> None:
    rows = [{"q": f"What is {i}?", "a": i} for i in range(50)]
    source = jsonl(tmp_path / "x.jsonl", rows, question_field="q", answer_field="a", answer_after=None)
    first, second = source.tasks("1"), source.tasks("2")
    assert first == source.tasks("1") != second
    assert sorted(task.id for task in first) == sorted(task.id for task in second)
    assert {task.answer for task in first} == {str(i) for i in range(50)}


def test_jsonl_keeps_separators_inside_strings(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "two\u2028lines", "answer": "#### 1"}\n')
    assert jsonl(tmp_path / "y.jsonl", [path.read_text()]).tasks("")[0].question == "two\u2028lines"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json\n", "x.jsonl:2: not JSON"),
        ({"question": "q"}, r"x.jsonl:2: no field 'answer'; the line has \['question'\]"),
        ([1, 2], "x.jsonl:2: no field 'question'; the line has list"),
        ({"question": "q", "answer": "7"}, "x.jsonl:2: answer_after='####' does not occur"),
        ({"question": "q", "answer": "#### "}, "x.jsonl:2: the question or the answer is empty"),
        ({"question": None, "answer": "#### 7"}, "x.jsonl:2: field 'question' is neither text nor a number: None"),
        ({"question": "q", "answer": True}, "x.jsonl:2: field 'answer'"),
    ],
)
def test_jsonl_faults_name_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jsonl(tmp_path / "x.jsonl", [GSM[0], row])


def test_jsonl_without_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are none"):
        jsonl(tmp_path / "x.jsonl", ["\n"])


def test_question_hash_ignores_typography_only() -> None:
    assert question_hash("What  is 1 + 2?\n") == question_hash("what is 1 + 2?")
    assert question_hash("1 + 2") != question_hash("1 - 2")


def test_heldout_share_is_met_and_grows_as_a_superset() -> None:
    questions = [f"question {i}" for i in range(4000)]
    small, large = ({q for q in questions if is_heldout(q, share)} for share in (0.1, 0.2))
    assert 340 < len(small) < 460
    assert small < large
    assert not any(is_heldout(q, 0.0) for q in questions[:100])


def test_train_and_heldout_never_meet() -> None:
    heldout = {t.question for t in make_stream(reasoning(), seed=0, heldout_share=0.1).heldout(100)}
    assert len(heldout) == 100
    for seed, size in ((0, 50), (1, 200), (2, 500)):
        stream = make_stream(reasoning(size=size), seed=seed, heldout_share=0.1)
        assert not heldout & {t.question for t in stream.take(2000)}


def test_heldout_tasks_do_not_depend_on_seed_or_position() -> None:
    first, second = (make_stream(reasoning(), seed=seed, heldout_share=0.1) for seed in (0, 7))
    second.take(333)
    assert first.heldout(40) == second.heldout(40)
    assert first.heldout(60)[:40] == first.heldout(40)


def test_too_few_heldout_tasks_is_an_error() -> None:
    source = reasoning(params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    stream = make_stream(source, seed=0, heldout_share=0.1)
    space = [f"{a} {sign} {b}" for a in range(10) for sign in "+-" for b in range(10)]
    available = sum(is_heldout(question, 0.1) for question in space)
    assert len(stream.heldout(available)) == available
    with pytest.raises(ValueError, match=f"{available + 1} held-out tasks asked.*delivers {available} "):
        stream.heldout(available + 1)
    with pytest.raises(ValueError, match="delivers 0"):
        make_stream(source, seed=0, heldout_share=0.0).heldout(1)


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_stream_is_deterministic_and_independent_of_batch_size() -> None:
    a, b = (make_stream(reasoning(), seed=3, heldout_share=0.1) for _ in range(2))
    batches = [task for _ in range(10) for task in a.take(64)]
    assert ids(batches) == ids(b.take(640))
    assert ids(batches) != ids(make_stream(reasoning(), seed=4, heldout_share=0.1).take(640))


def test_stream_of_a_file_goes_round_in_new_orders(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(30)]
    stream = make_stream(jsonl(tmp_path / "x.jsonl", rows), seed=0, heldout_share=0.0)
    first, second = ids(stream.take(30)), ids(stream.take(30))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("taken", [0, 17, 170, 400])
def test_stream_resumes_where_it_was(taken: int) -> None:
    stream = make_stream(reasoning(), seed=3, heldout_share=0.1)
    stream.take(taken)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = ids(stream.take(300))
    resumed = make_stream(reasoning(), seed=3, heldout_share=0.1)
    resumed.take(5)
    resumed.load_state_dict(state)
    assert ids(resumed.take(300)) == expected


def test_stream_on_another_source_starts_anew_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    stream = make_stream(reasoning(), seed=3, heldout_share=0.1)
    stream.take(100)
    other = make_stream(reasoning(size=100), seed=3, heldout_share=0.1)
    expected = ids(other.take(50))
    other.load_state_dict(stream.state_dict())
    assert ids(other.take(50)) == expected
    assert "the stream starts anew" in caplog.text


def test_stream_settings_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"heldout_share=1\.0"):
        make_stream(reasoning(), seed=0, heldout_share=1.0)
    question = next(f"question {i}" for i in range(1000) if is_heldout(f"question {i}", 0.1))
    source = jsonl(tmp_path / "x.jsonl", [{"question": question, "answer": "#### 1"}])
    with pytest.raises(ValueError, match="leaves none of the 1 tasks"):
        make_stream(source, seed=0, heldout_share=0.1)


@pytest.mark.parametrize("answer", ["8", "-1", "0", "1000", "0.5", "1.05", r"\frac{1}{2}", "3-4", "x=7", "1,200"])
def test_near_misses_differ_and_look_alike(answer: str) -> None:
    rng = random.Random(0)
    misses = {near_miss(answer, rng) for _ in range(200)}
    assert answer not in misses
    assert len(misses) >= 4
    if answer.lstrip("-").isdigit():
        assert {abs(int(miss) - int(answer)) for miss in misses} == {1, 2, 3, 10}
    with pytest.raises(ValueError, match="no near miss of 'x'"):
        near_miss("x", rng)
