import dataclasses

import pytest

from spark_megatron.rewards.noise import LabelNoise, flip_figures
from spark_megatron.types import Group, Rollout, Task, TaskKind, Verdict

RIGHT, WRONG = Verdict("ok", 1.0, "8"), Verdict("ok", 0.0, "9")


def group(number: int, *verdicts: Verdict, kind: TaskKind = "solve") -> Group:
    rollouts = tuple(Rollout((1,), (0.0,), f"{i}", "stop", 0) for i in range(len(verdicts)))
    return Group(Task(f"t{number}", kind, "p", "8", "math", "q"), (1,), rollouts, verdicts)


MANY = [group(i, RIGHT, RIGHT, WRONG, WRONG, Verdict("unparsed")) for i in range(1000)]


def test_each_class_is_flipped_at_its_own_rate() -> None:
    noisy = LabelNoise(right_to_wrong=0.1, wrong_to_right=0.3)(MANY, seed=0)
    flips = [[v.flipped for v in g.verdicts] for g in noisy]
    assert 0.08 < sum(f[0] + f[1] for f in flips) / 2000 < 0.12
    assert 0.27 < sum(f[2] + f[3] for f in flips) / 2000 < 0.33
    assert flip_figures(noisy) == {
        "label_noise/right_to_wrong": sum(f[0] + f[1] for f in flips) / 2000,
        "label_noise/wrong_to_right": sum(f[2] + f[3] for f in flips) / 2000,
    }
    for before, after in zip(MANY, noisy, strict=True):
        assert (before.task, before.rollouts) == (after.task, after.rollouts)
        for old, new in zip(before.verdicts, after.verdicts, strict=True):
            assert new == (dataclasses.replace(old, reward=1.0 - old.reward, flipped=True) if new.flipped else old)


def test_all_and_nothing() -> None:
    everything = LabelNoise(right_to_wrong=1.0, wrong_to_right=1.0)([group(0, RIGHT, WRONG)], seed=0)
    assert everything[0].rewards == (0.0, 1.0)
    assert [v.parsed for v in everything[0].verdicts] == ["8", "9"]
    nothing = LabelNoise(right_to_wrong=0.0, wrong_to_right=0.0)
    assert nothing(MANY, seed=0) == MANY
    assert not nothing.active
    assert LabelNoise(right_to_wrong=0.0, wrong_to_right=0.01).active


def test_what_no_verifier_decided_is_left_alone() -> None:
    noise = LabelNoise(right_to_wrong=1.0, wrong_to_right=1.0)
    others = group(0, Verdict("unparsed"), Verdict("truncated"), Verdict("timeout"), Verdict("error"))
    partial = group(1, Verdict("ok", 0.5, "8"))
    judged = [group(2, RIGHT, WRONG, kind=kind) for kind in ("judge_one", "judge_pair")]
    assert noise([others, partial, *judged], seed=0) == [others, partial, *judged]
    assert noise([group(3, RIGHT, kind="reflect")], seed=0)[0].rewards == (0.0,)
    assert flip_figures([others, partial, *judged]) == {}


def test_flips_depend_on_seed_task_and_place_alone() -> None:
    noise = LabelNoise(right_to_wrong=0.5, wrong_to_right=0.5)
    whole = noise(MANY, seed=3)
    assert noise(MANY[::-1], seed=3) == whole[::-1]
    assert noise(MANY[7:8], seed=3) == whole[7:8]
    assert noise(MANY, seed=4) != whole
    flips = [tuple(v.flipped for v in g.verdicts[:4]) for g in whole]
    assert len(set(flips)) == 16  # each of the four independent of the others


def test_the_warning_names_the_settings_and_their_values() -> None:
    text = LabelNoise(right_to_wrong=0.1, wrong_to_right=0.25).warning
    assert "label_noise.right_to_wrong=0.1" in text
    assert "label_noise.wrong_to_right=0.25" in text


@pytest.mark.parametrize("name", ["right_to_wrong", "wrong_to_right"])
def test_shares_out_of_range_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=1.5: must lie in \[0, 1\]"):
        LabelNoise(**{"right_to_wrong": 0.0, "wrong_to_right": 0.0, name: 1.5})
