"""The data that flows through the system, in the order in which it comes to exist.

    Task --sample--> Rollout (n of them form a Group) --check--> Verdict --to_samples--> Sample --pack--> Batch

Everything here is plain data: no tensors but in ``Batch``, no behaviour beyond small derived values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, Literal, Self

if TYPE_CHECKING:
    import torch

TaskKind = Literal["solve", "judge_one", "judge_pair", "reflect"]
TASK_KINDS: tuple[TaskKind, ...] = ("solve", "judge_one", "judge_pair", "reflect")

Status = Literal["ok", "unparsed", "truncated", "timeout", "error"]


Turn = tuple[str, str]
"""A role ("system", "user" or "assistant") and what it says."""


@dataclass(frozen=True)
class Task:
    """A prompt with a way to check its answer.

    ``prompt`` is the user's turn as plain text (the chat template is applied when it is encoded), ``context`` the turns
    before it, a system prompt above all. ``answer`` is the gold answer, ``verifier`` the name of the verifier (a key of
    the ``verifiers`` settings) that compares the two. ``question`` is the original question without any instruction;
    recycled tasks keep the one they came from. ``source`` is the id of the task that a recycled one was made from (""
    for an original task), ``shown`` the answer or answers that a judge or reflection prompt displays. ``labels`` are
    the verdicts that a judge task offers: (the shown answer is right, it is wrong), or (the first is right, the second
    is).
    """

    id: str
    kind: TaskKind
    prompt: str
    answer: str
    verifier: str
    question: str
    source: str = ""
    shown: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    context: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The result of checking one response. A status other than ``ok`` is not a reward; ``reward`` is then 0."""

    status: Status
    reward: float = 0.0
    parsed: str | None = None
    """The answer as it was extracted from the response; None where nothing could be."""
    flipped: bool = False
    """Whether the reward is the opposite of what the check found, on purpose (``label_noise``)."""


@dataclass(frozen=True)
class Rollout:
    """One sampled response. ``logprobs[i]`` is the sampler's log-probability of ``tokens[i]`` at its temperature."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Literal["stop", "length"]
    weight_version: int
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values the sampler took from an earlier request."""


@dataclass(frozen=True)
class Group:
    """The n rollouts of one task; ``verdicts`` is empty until they are checked, then it has one per rollout."""

    task: Task
    prompt_tokens: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(v.reward for v in self.verdicts)


Component = str
"""Which term of the objective a token belongs to: "policy", "pointwise", "pairwise", "reflection" or "sft"."""


@dataclass(frozen=True)
class Sample:
    """One sequence to train on: ``prompt`` is context only, every token of ``response`` is trained.

    ``loss`` selects the token loss: "policy_gradient" uses ``advantage``; "cross_entropy" (supervised) ignores it.
    ``rollout_logprobs`` has the length of ``response`` for sampled responses and is empty for supervised ones.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    component: Component
    loss: Literal["policy_gradient", "cross_entropy"] = "policy_gradient"
    advantage: float = 0.0
    rollout_logprobs: tuple[float, ...] = ()
    weight_version: int = -1


@dataclass(frozen=True)
class Comparison:
    """Texts that a reward model learns from: ``right`` shall score high and ``wrong`` low.

    Either may be empty, for a text that is only labelled.
    """

    right: tuple[int, ...]
    wrong: tuple[int, ...]


@dataclass
class Sequences:
    """Sequences packed one behind the other, without padding: what the layers of a model see of a micro-batch."""

    BESIDE: ClassVar[frozenset[str]] = frozenset({"cu_seqlens"})
    """The fields that are not [tokens]."""

    cu_seqlens: torch.Tensor
    """int32 [sequences + 1]: sequence i holds the positions ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``."""
    tokens: torch.Tensor

    def per_token(self) -> dict[str, torch.Tensor]:
        """The [tokens] tensors that are there, by name."""
        return {name: x for name, x in self._tensors().items() if name not in self.BESIDE}

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on ``device``."""
        return type(self)(**{name: x.to(device) for name, x in self._tensors().items()})

    def emptied(self) -> Self:
        """One sequence of two tokens that trains nothing, with every tensor that is there."""
        tensors = {name: x.new_zeros(2) if name not in self.BESIDE else x[:0] for name, x in self._tensors().items()}
        return type(self)(**(tensors | {"cu_seqlens": self.cu_seqlens.new_tensor([0, 2])}))

    def _tensors(self) -> dict[str, torch.Tensor]:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in given.items() if x is not None}


@dataclass
class Comparisons(Sequences):
    """A micro-batch for a reward model, which gives each sequence one score.

    Term k of the loss says that sequence ``better[k]`` shall score higher than sequence ``worse[k]``; -1 stands for a
    score of 0, so that a label is a comparison too: of a right text with 0, or of 0 with a wrong one. Both sequences of
    a term are in the same micro-batch. ``weight`` is settled over the whole step, so that its loss is a plain sum.
    """

    BESIDE: ClassVar[frozenset[str]] = Sequences.BESIDE | {"better", "worse", "weight"}

    better: torch.Tensor
    worse: torch.Tensor
    weight: torch.Tensor


@dataclass
class Batch(Sequences):
    """A micro-batch for a language model.

    All tensors but ``cu_seqlens`` are [tokens]; position t predicts ``labels[t]``, the next token of its sequence.
    ``weight`` is ``coef_c / N_c`` on trained positions and 0 elsewhere, so that the loss of a step is a plain sum.
    ``kl_weight`` is ``1 / N`` over all trained policy-gradient tokens of the step.
    """

    labels: torch.Tensor
    weight: torch.Tensor
    kl_weight: torch.Tensor
    advantage: torch.Tensor
    supervised: torch.Tensor
    """Bool: positions whose loss is cross-entropy rather than the policy loss."""
    rollout_logprobs: torch.Tensor
    """The sampler's log-probs (NaN where there is none)."""
    weight_version: torch.Tensor
    """Int: the version of the weights that sampled the label (-1 where none did)."""
    old_logprobs: torch.Tensor | None = None
    """The trainer's own log-probs before the first update of the period."""
    ref_logprobs: torch.Tensor | None = None

    @property
    def trained(self) -> torch.Tensor:
        """Bool [tokens]: positions that take part in the loss."""
        return (self.weight != 0) | (self.kl_weight != 0)


Metrics = dict[str, float]


@dataclass(frozen=True)
class Interval:
    """A proportion with its 95 % interval."""

    acc: float
    ci: tuple[float, float]
    n: int


@dataclass(frozen=True)
class EvalResult:
    """Held-out figures of one evaluation; ``counts`` has the number of responses per verdict status.

    ``judging`` says how the judgements of the suite's own items came out, under the names of ``judge_figures``.
    """

    solve: Interval
    judge_one: Interval
    judge_pair: Interval
    reflect: Interval
    counts: Mapping[str, int] = field(default_factory=dict)
    judging: Mapping[str, float] = field(default_factory=dict)
