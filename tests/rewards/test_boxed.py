import pytest

from spark_megatron.rewards.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}", "42"),
        (r"so \boxed{ 42 }.", "42"),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),
        (r"First \boxed{3}, wait, so \boxed{4}.", "4"),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"\boxed{5", None),
        (r"\boxed{ {5}", None),
        (r"\boxed{\{2,1\}}", r"\{2,1\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{cut \boxed{7}", "7"),
        (r"an open { before \boxed{7}", "7"),
        (r"} a stray one, then \boxed{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{}", ""),
        (r"\box{7}", "7"),
        (r"\fbox{7}", "7"),
        ("The answer is 42.", None),
        ("", None),
        (r"<answer>\boxed{42}</answer>", "42"),
        ("\\boxed{a\nb}", "a\nb"),
        (r"ends in a backslash \boxed{1} \ "[:-1], "1"),
    ],
)
def test_last_complete_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize("unit", [r"\boxed{", r"\boxed", "{", "}", r"\text{", "\\", r"\boxed ", r"\boxed{1"])
def test_degenerate_text_takes_one_pass(unit: str) -> None:
    # With a scan per box these would take hours.
    assert last_boxed(unit * 100_000) is None
