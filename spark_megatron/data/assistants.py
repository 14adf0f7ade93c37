"""Assistants that turn a right response into a wrong one, for a reward model to tell the two apart."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from spark_megatron import runtime
from spark_megatron.data.chat_model import ChatModel, ChatModelError
from spark_megatron.recycle.distractors import near_miss
from spark_megatron.recycle.templates import fill
from spark_megatron.rewards.boxed import last_boxed
from spark_megatron.types import Task


@dataclass(frozen=True)
class Original:
    """A response that the rule verifier calls right."""

    task: Task
    text: str


class Ask(Protocol):
    """The policy's own responses to tasks; None where a prompt leaves no room for one. A collective."""

    def __call__(
        self, tasks: Sequence[Task], *, temperature: float, max_new_tokens: int, seed: tuple[object, ...]
    ) -> list[str | None]: ...


class Assistant(Protocol):
    """Gives a corrupted text per original, None where it could not. A collective: the same texts on every rank."""

    def __call__(self, originals: Sequence[Original], seed: tuple[object, ...], ask: Ask) -> Sequence[str | None]: ...


class RuleCorruptor:
    """Puts a near miss in the place of the final answer, wherever the response has it as a number of its own.

    It needs no model: for tests and tiny models. A response whose box holds no digit cannot be corrupted.
    """

    def __call__(self, originals: Sequence[Original], seed: tuple[object, ...], ask: Ask) -> list[str | None]:
        return [self._corrupted(o.text, random.Random(repr((*seed, o.task.id)))) for o in originals]

    def _corrupted(self, text: str, rng: random.Random) -> str | None:
        answer = (last_boxed(text) or "").strip()
        if not re.search(r"[0-9]", answer):
            return None
        alone = re.compile(rf"(?<![\w.+-]){re.escape(answer)}(?![\w.]|\.\d)")
        wrong = near_miss(answer, rng)
        return alone.sub(lambda _: wrong, text)


class OwnSampler:
    """Asks the policy itself, with a prompt that has the fields ``{question}`` and ``{response}``."""

    def __init__(self, *, instruction: str, temperature: float, max_new_tokens: int) -> None:
        _check_fields(instruction)
        self._instruction = instruction
        self._temperature, self._max_new_tokens = temperature, max_new_tokens

    def __call__(self, originals: Sequence[Original], seed: tuple[object, ...], ask: Ask) -> list[str | None]:
        tasks = [self._task(original) for original in originals]
        return ask(tasks, temperature=self._temperature, max_new_tokens=self._max_new_tokens, seed=seed)

    def _task(self, original: Original) -> Task:
        prompt = fill(self._instruction, {"question": original.task.question, "response": original.text})
        return replace(original.task, prompt=prompt, kind="reflect", source=original.task.id)


class Endpoint:
    """Asks a chat model of its own, with a message that has the fields ``{question}`` and ``{response}``.

    A reply may have ``extra_tokens`` more tokens than the original has words.
    """

    def __init__(self, *, chat_model: ChatModel, message: str, extra_tokens: int) -> None:
        _check_fields(message, "message")
        self._chat_model, self._message, self._extra_tokens = chat_model, message, extra_tokens

    def __call__(self, originals: Sequence[Original], seed: tuple[object, ...], ask: Ask) -> Sequence[str | None]:
        """Rank zero asks for all; replies are not repeatable, and ``seed`` plays no part.

        Raises:
            ChatModelError: not one request was answered.
        """
        messages = [fill(self._message, {"question": o.task.question, "response": o.text}) for o in originals]
        limits = [len(o.text.split()) + self._extra_tokens for o in originals]
        return runtime.decided_by_zero(lambda: self._chat_model.replies(messages, limits), ChatModelError)


def _check_fields(text: str, name: str = "instruction") -> None:
    """ValueError unless ``text`` has the fields that show an original."""
    for field in ("{question}", "{response}"):
        if field not in text:
            raise ValueError(f"{name}={text[:60]!r}: must contain {field}")
