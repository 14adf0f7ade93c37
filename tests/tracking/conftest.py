"""Small groups to track."""

from collections.abc import Callable, Sequence

import pytest

from spark_megatron.types import Group, Rollout, Task, TaskKind, Verdict

MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group() -> MakeGroup:
    """A group from its verdicts; rollout i has i + 1 tokens unless ``tokens`` is given."""

    def make(
        verdicts: Sequence[Verdict],
        kind: TaskKind = "solve",
        tokens: Sequence[tuple[int, ...]] | None = None,
        task_id: str = "t",
    ) -> Group:
        tokens = tokens or [tuple(range(i + 1)) for i in range(len(verdicts))]
        rollouts = tuple(
            Rollout(tokens=t, logprobs=(0.0,) * len(t), text=f"text {len(t)}", finish="stop", weight_version=7 + i)
            for i, t in enumerate(tokens)
        )
        task = Task(id=task_id, kind=kind, prompt="1+1?", answer="2", verifier="math", question="1+1?")
        return Group(task=task, prompt_tokens=(1, 2), rollouts=rollouts, verdicts=tuple(verdicts))

    return make
