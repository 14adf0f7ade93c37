import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from spark_megatron.recycle.mixture import Recycler
from spark_megatron.recycle.offline import Offline
from spark_megatron.recycle.supervised import with_targets
from spark_megatron.recycle.templates import Template, load_bank
from spark_megatron.types import Group, Rollout, Task, TaskKind, Verdict

DEFAULTS: dict[str, Any] = {
    "bank": load_bank("concise"),
    "judge_view": "answer",
    "judge_verifier": "choice",
    "pairwise_prob": 0.7,
    "max_judge": 32,
    "max_reflection": 32,
    "both_orders_share": 0.0,
    "balance_pointwise": False,
    "reflect_cot_share": 0.5,
    "reflect_correct_share": 0.0,
}
FULL = load_bank("full")
UNREAD = None


def group(name: str, answers: Sequence[str | None], kind: TaskKind = "solve") -> Group:
    """A group with gold answer "8"; None is a rollout without a readable answer."""
    task = Task(name, kind, f"prompt {name}", "8", "math", f"question {name}")
    verdicts = tuple(Verdict("unparsed") if a is None else Verdict("ok", float(a == "8"), a) for a in answers)
    texts = [f"{name} gives up" if a is None else f"{name} work {i} \\boxed{{{a}}}" for i, a in enumerate(answers)]
    return Group(task, (1,), tuple(Rollout((1,), (0.0,), text, "stop", 0) for text in texts), verdicts)


def run(groups: Sequence[Group], seed: int = 0, **settings: Any) -> dict[str, list[Task]]:
    tasks = Recycler(**{**DEFAULTS, **settings})(groups, random.Random(seed))
    return {kind: [t for t in tasks if t.kind == kind] for kind in ("judge_one", "judge_pair", "reflect")}


def many(count: int, answers: Sequence[str | None]) -> list[Group]:
    return [group(f"q{i}", answers) for i in range(count)]


def test_all_right_gives_one_pointwise_item_that_is_right() -> None:
    made = run([group("q", ["8"] * 4)])
    assert [task.answer for task in made["judge_one"]] == ["Yes"]
    assert not made["judge_pair"]
    assert not made["reflect"]


def test_all_wrong_gives_one_pointwise_item_on_an_answer_that_could_be_read() -> None:
    shown: Counter[str] = Counter()
    for seed in range(100):
        made = run([group("q", [UNREAD, "9", UNREAD, "7"])], seed)
        (item,) = made["judge_one"]
        assert item.answer == "No"
        shown[item.shown[0]] += 1
        assert len(made["reflect"]) == 1
        assert not made["judge_pair"]
    assert set(shown) == {"9", "7"}


def test_all_wrong_and_unreadable_can_only_be_reflected_on_with_its_whole_text() -> None:
    made = run([group("q", [UNREAD] * 3)])
    assert not made["judge_one"]
    assert not made["judge_pair"]
    assert [task.shown for task in made["reflect"]] == [("q gives up",)]
    assert not run([group("q", [UNREAD] * 3)], reflect_cot_share=0.0)["reflect"]


def test_mixed_groups_follow_the_proportions() -> None:
    groups = many(3000, ["8", "8", "8", "9"])
    made = run(groups, max_judge=3000, max_reflection=3000)
    assert len(made["judge_pair"]) + len(made["judge_one"]) == 3000
    assert 0.67 < len(made["judge_pair"]) / 3000 < 0.73
    labels = Counter(task.answer for task in made["judge_one"])
    assert abs(labels["Yes"] - labels["No"]) <= 1  # by class, not by rollout (three of four are right)
    letters = Counter(task.answer for task in made["judge_pair"])
    assert abs(letters["A"] - letters["B"]) <= 1
    assert len(made["reflect"]) == 3000


def test_pairwise_probability_is_a_setting() -> None:
    groups = many(20, ["8", "9"])
    assert len(run(groups, pairwise_prob=1.0)["judge_pair"]) == 20
    assert len(run(groups, pairwise_prob=0.0)["judge_one"]) == 20


def test_at_most_one_judge_and_one_reflection_per_prompt() -> None:
    groups = many(8, ["8", "9", "7"]) + [group("r", ["8"]), group("w", ["1"])]
    for seed in range(50):
        made = run(groups, seed)
        judges = Counter(task.source for task in made["judge_one"] + made["judge_pair"])
        reflections = Counter(task.source for task in made["reflect"])
        assert len(judges) == 10
        assert max(judges.values()) == 1
        assert len(reflections) == 9
        assert max(reflections.values()) == 1


def test_a_mixed_group_whose_wrong_answers_are_unreadable_makes_no_pair() -> None:
    made = run([group("q", ["8", UNREAD])], pairwise_prob=1.0)
    assert [task.answer for task in made["judge_one"]] == ["Yes"]
    assert not made["judge_pair"]


def test_equal_answers_never_form_a_pair() -> None:
    odd = group("q", ["8", "8"])
    odd = Group(odd.task, odd.prompt_tokens, odd.rollouts, (Verdict("ok", 1.0, "8"), Verdict("ok", 0.0, "8.")))
    assert not run([odd], pairwise_prob=1.0)["judge_pair"]


def test_caps_draw_uniformly() -> None:
    groups = many(64, ["8", "9"])
    judged: Counter[str] = Counter()
    reflected: Counter[str] = Counter()
    for seed in range(300):
        made = run(groups, seed)
        judges = made["judge_one"] + made["judge_pair"]
        assert len(judges) == 32
        assert len(made["reflect"]) == 32
        judged.update(task.source for task in judges)
        reflected.update(task.source for task in made["reflect"])
    for counts in (judged, reflected):
        assert len(counts) == 64
        assert min(counts.values()) > 105
        assert max(counts.values()) < 195


def test_caps_are_settings() -> None:
    made = run(many(20, ["8", "9"]), max_judge=3, max_reflection=0)
    assert len(made["judge_one"]) + len(made["judge_pair"]) == 3
    assert not made["reflect"]


def test_half_of_the_reflections_show_the_whole_solution() -> None:
    groups = many(40, ["8", "9"])
    for share, expected in ((0.5, 16), (0.25, 8), (0.0, 0), (1.0, 32)):
        made = run(groups, reflect_cot_share=share)["reflect"]
        whole = [f"Fix: {t.question} = {t.source} work 1 \\boxed{{9}} \\boxed{{}}" == t.prompt for t in made]
        bare = [f"Fix: {t.question} = 9 \\boxed{{}}" == t.prompt for t in made]
        assert (sum(whole), sum(bare)) == (expected, len(made) - expected)


def test_only_solving_is_recycled() -> None:
    groups = [group("j", ["8", "9"], kind) for kind in ("judge_one", "judge_pair", "reflect")]
    assert run(groups) == {"judge_one": [], "judge_pair": [], "reflect": []}


def test_balancing_drops_the_majority_of_pointwise_items() -> None:
    groups = [group(f"r{i}", ["8"]) for i in range(20)] + [group(f"w{i}", ["9"]) for i in range(3)]
    assert Counter(t.answer for t in run(groups, max_judge=99)["judge_one"]) == {"Yes": 20, "No": 3}
    assert Counter(t.answer for t in run(groups, max_judge=99, balance_pointwise=True)["judge_one"]) == {
        "Yes": 3,
        "No": 3,
    }
    assert not run(groups[:20], balance_pointwise=True)["judge_one"]
    pairs = run(many(5, ["8", "9"]) + groups[:20], balance_pointwise=True, pairwise_prob=1.0)
    assert len(pairs["judge_pair"]) == 5


def test_reflections_on_right_answers_are_a_setting() -> None:
    groups = [group(f"r{i}", ["8"]) for i in range(40)] + [group(f"w{i}", ["9"]) for i in range(12)]

    def by_class(share: float, seed: int) -> tuple[int, int]:
        sources = [task.source[0] for task in run(groups, seed, reflect_correct_share=share)["reflect"]]
        return sources.count("r"), sources.count("w")

    for seed in range(10):
        assert by_class(0.0, seed) == (0, 12)
        right, wrong = by_class(0.25, seed)
        assert wrong >= 9
        assert 3 <= right <= (right + wrong) * 0.25
        assert sum(by_class(1.0, seed)) == 32
    mixed = run(many(32, ["8", "9"]), reflect_correct_share=1.0, reflect_cot_share=0.0)["reflect"]
    assert {task.shown for task in mixed} == {("8",)}


def written(template: Template, task: Task) -> bool:
    """Whether the task's prompt is that template, filled in."""
    pieces = re.split(r"\{[a-z]+\}", template.text)
    return re.fullmatch(".*".join(map(re.escape, pieces)), task.prompt, re.DOTALL) is not None


def test_a_right_answer_is_never_called_wrong() -> None:
    told = [t for t in FULL.reflect.templates if t.told_wrong]
    for answer, share, blamed in (("8", 1.0, False), ("9", 0.0, True)):
        made = run(many(32, [answer]), bank=FULL, reflect_correct_share=share)["reflect"]
        assert len(made) == 32
        assert any(written(template, task) for task in made for template in told) == blamed


@pytest.mark.parametrize("seed", range(20))
def test_orders_classes_and_templates_come_equally_often(seed: int) -> None:
    """In each call, whatever groups it gets, counts differ by at most one."""
    rng = random.Random(seed)
    groups = many(rng.randrange(30, 90), ["8", "9", "8", "7"])
    groups += [group(f"r{i}", ["8", "8"]) for i in range(rng.randrange(40))]
    groups += [group(f"w{i}", ["9", "7"]) for i in range(rng.randrange(40))]
    limit = rng.choice((25, 32, 500))
    made = run(
        groups,
        seed,
        bank=FULL,
        pairwise_prob=0.5,
        balance_pointwise=True,
        max_judge=limit,
        max_reflection=limit,
    )
    first = [task.answer == task.labels[0] for task in made["judge_pair"]]
    right = [task.answer == task.labels[0] for task in made["judge_one"]]
    for flags in (first, right):
        assert len(flags) > 2
        assert abs(flags.count(True) - flags.count(False)) <= 1
    for kind in ("judge_one", "judge_pair"):
        for part in (made[kind], *([t for t in made["judge_one"] if (t.answer == t.labels[0]) == c] for c in (0, 1))):
            of_kind = [task for task in part if task.kind == kind]
            counts = [sum(written(t, task) for task in of_kind) for t in getattr(FULL, kind).templates]
            assert sum(counts) == len(of_kind)
            assert max(counts) - min(counts) <= 1
    for view in ("cot", "answer"):
        counts = [sum(written(t, task) for task in made["reflect"]) for t in FULL.reflect.options(view)]
        assert max(counts) - min(counts) <= 1


def test_a_template_comes_with_both_orders() -> None:
    made = run(many(400, ["8", "9"]), bank=FULL, pairwise_prob=1.0, max_judge=400)["judge_pair"]
    for template in FULL.judge_pair.templates:
        letters = [task.answer for task in made if written(template, task)]
        assert (letters.count("A"), letters.count("B")) == (10, 10)


def test_every_cut_of_the_tasks_is_balanced() -> None:
    """The pool hands them out in order: a reward period may begin and end anywhere."""
    groups = (
        many(40, ["8", "9"]) + [group(f"r{i}", ["8"]) for i in range(10)] + [group(f"w{i}", ["9"]) for i in range(9)]
    )
    tasks = Recycler(**{**DEFAULTS, "max_judge": 99, "balance_pointwise": True})(groups, random.Random(1))
    whole = Counter(task.kind for task in tasks)
    for size in (8, 16, 32):
        for begin in range(len(tasks) - size + 1):
            cut = tasks[begin : begin + size]
            for kind, labels in {"judge_one": ("Yes", "No"), "judge_pair": ("A", "B")}.items():
                counts = [sum(t.answer == label for t in cut if t.kind == kind) for label in labels]
                assert abs(counts[0] - counts[1]) <= 1
            for kind, count in whole.items():
                assert abs(sum(t.kind == kind for t in cut) - size * count / len(tasks)) <= 2


def test_pairs_in_both_orders_are_a_setting() -> None:
    groups = many(40, ["8", "9"])
    for share, limit, pairs, both in ((0.0, 99, 40, 0), (0.25, 99, 40, 10), (1.0, 99, 40, 40), (0.25, 25, 20, 5)):
        made = run(groups, both_orders_share=share, pairwise_prob=1.0, max_judge=limit, bank=FULL)["judge_pair"]
        assert len(made) == pairs + both <= limit
        shown: dict[str, list[Task]] = {}
        for task in made:
            shown.setdefault(task.source, []).append(task)
        assert len(shown) == pairs
        twins = [tasks for tasks in shown.values() if len(tasks) == 2]
        assert len(twins) == both
        for one, other in twins:
            assert one.shown == other.shown[::-1]
            assert {one.answer, other.answer} == {"A", "B"}
            assert [written(t, one) for t in FULL.judge_pair.templates] == [
                written(t, other) for t in FULL.judge_pair.templates
            ]
        letters = Counter(task.answer for task in made)
        assert abs(letters["A"] - letters["B"]) <= 1


def test_mixed_groups_show_both_classes_equally_often_even_where_one_is_rare() -> None:
    """What a question is like must not tell whether its answer is right."""
    groups = [group(f"r{i}", ["8"]) for i in range(20)] + many(9, ["8", "9"])
    made = run(groups, pairwise_prob=0.0, max_judge=99)["judge_one"]
    counts = Counter(task.answer for task in made if task.source.startswith("q"))
    assert sorted(counts.values()) == [4, 5]
    balanced = Counter(task.answer for task in run(groups, pairwise_prob=0.0, balance_pointwise=True)["judge_one"])
    assert balanced["Yes"] == balanced["No"] in (4, 5)


def test_judge_view_is_a_setting() -> None:
    groups = many(10, ["8", "9"])
    for view in ("answer", "cot", "both"):
        made = run(groups, judge_view=view, pairwise_prob=0.0)["judge_one"]
        assert {task.shown for task in made} == {("8",), ("9",)}
        for task in made:
            (answer,) = task.shown
            work = f"{task.source} work {'89'.index(answer)} \\boxed{{{answer}}}"
            shown = {"answer": answer, "cot": work, "both": f"{work} Answer: {answer}"}[view]
            assert task.prompt == f"Judge: {task.question} = {shown} \\boxed{{}}"


def test_same_seed_same_tasks() -> None:
    groups = many(40, ["8", "9", UNREAD])
    assert run(groups, 5) == run(groups, 5) != run(groups, 6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pairwise_prob", 1.1),
        ("both_orders_share", -0.5),
        ("reflect_cot_share", -0.1),
        ("reflect_correct_share", 2),
        ("max_judge", -1),
        ("max_reflection", -1),
        ("judge_view", "all"),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Recycler(**{**DEFAULTS, name: value})


def test_supervised_targets() -> None:
    groups = [group("m", ["8", "9", "8"]), group("w", ["9"])]
    tasks = Recycler(**DEFAULTS)(groups, random.Random(0))
    pairs = with_targets(tasks, groups, random.Random(0))
    made = {(task.source, task.kind): text for task, text in pairs}
    assert ("w", "reflect") not in made  # no right response to learn from
    assert made["m", "reflect"] in ("m work 0 \\boxed{8}", "m work 2 \\boxed{8}")
    for task, text in pairs:
        if task.kind != "reflect":
            assert text == f"\\boxed{{{task.answer}}}"
    assert len(pairs) == 3


def test_supervised_targets_need_the_groups() -> None:
    groups = [group("m", ["8", "9"])]
    tasks = [t for t in Recycler(**DEFAULTS)(groups, random.Random(0)) if t.kind == "reflect"]
    with pytest.raises(ValueError, match="its group 'm' is not among"):
        with_targets(tasks, [], random.Random(0))
    with pytest.raises(ValueError, match="'solve' has no supervised target"):
        with_targets([groups[0].task], groups, random.Random(0))


def test_offline_judges_see_the_gold_answer_and_a_made_up_one_whatever_was_sampled() -> None:
    offline = Offline(**DEFAULTS | {"max_reflection": 0, "max_judge": 200})
    groups = many(200, ["5", "6"])
    tasks = offline([*groups, group("j", ["8"], kind="judge_one")], random.Random(0))
    assert offline(many(200, ["8", UNREAD]), random.Random(0)) == tasks
    kinds = Counter(task.kind for task in tasks)
    assert kinds["judge_one"] + kinds["judge_pair"] == 200
    assert kinds["judge_pair"] == pytest.approx(140, abs=30)
    for task in tasks:
        right = {"Yes": True, "No": False}.get(task.answer)
        if task.kind == "judge_one":
            assert (task.shown == ("8",)) == right
        else:
            assert task.shown["AB".index(task.answer)] == "8"
            assert len(set(task.shown)) == 2
        assert not {"5", "6"} & set(task.shown) or abs(int(min(task.shown)) - 8) in (1, 2, 3, 10)
