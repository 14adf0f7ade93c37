"""Assistants that turn a right response into a wrong one, for a reward model to tell the two apart."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from spark_megatron import runtime
from spark_megatron.data.distractors import near_miss
from spark_megatron.recycle.templates import fill
from spark_megatron.rewards.boxed import last_boxed
from spark_megatron.types import Task

if TYPE_CHECKING:
    from openai import OpenAI


class AssistantError(RuntimeError):
    """No request to an assistant was answered."""


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
    """Asks a chat model behind an OpenAI-compatible address, such as one that ``vllm serve`` offers.

    Args:
        url: base address, ending in /v1.
        model: its name there.
        system: what the model is told to do.
        message: the user's turn, with the fields ``{question}`` and ``{response}``.
        extra_tokens: a reply may have this many tokens more than the original has words.
        concurrency: requests that are open at a time.
        retries: how often a request is repeated that was refused for now (429, 5xx) or not answered in time.
        timeout_seconds: for one attempt.
        key_variable: environment variable with the key; null where the server asks for none.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        system: str,
        message: str,
        temperature: float,
        extra_tokens: int,
        concurrency: int,
        retries: int,
        timeout_seconds: float,
        key_variable: str | None,
    ) -> None:
        _check_fields(message, "message")
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds={timeout_seconds}: must be greater than 0")
        if key_variable is not None and not os.environ.get(key_variable):
            raise ValueError(f"key_variable={key_variable}: there is no such environment variable; export it, or null")
        self._url, self._model, self._system, self._message = url, model, system, message
        self._temperature, self._extra_tokens, self._concurrency = temperature, extra_tokens, concurrency
        self._client: Callable[[], OpenAI] = partial(_client, url, key_variable, retries, timeout_seconds)

    def __call__(self, originals: Sequence[Original], seed: tuple[object, ...], ask: Ask) -> Sequence[str | None]:
        """Rank zero asks for all; replies are not repeatable, and ``seed`` plays no part.

        Raises:
            AssistantError: not one request was answered.
        """
        texts = [fill(self._message, {"question": o.task.question, "response": o.text}) for o in originals]
        limits = [len(o.text.split()) + self._extra_tokens for o in originals]
        return runtime.decided_by_zero(lambda: self.replies(texts, limits), AssistantError)

    def replies(self, texts: Sequence[str], max_tokens: Sequence[int]) -> list[str | None]:
        """The replies to user turns, in order; None for one that was not answered.

        Raises:
            AssistantError: not one was answered; says why the first was not.
        """
        with self._client() as client, ThreadPoolExecutor(self._concurrency) as pool:
            replies = list(pool.map(partial(self._reply, client), texts, max_tokens))
        answered = [reply if isinstance(reply, str) else None for reply in replies]
        if replies and not any(isinstance(reply, str) for reply in replies):
            raise AssistantError(f"none of {len(replies)} requests to {self._url} was answered: {replies[0]}")
        return answered

    def _reply(self, client: OpenAI, text: str, max_tokens: int) -> str | Exception:
        from openai import OpenAIError

        messages: Any = [{"role": "system", "content": self._system}, {"role": "user", "content": text}]
        try:
            reply = client.chat.completions.create(
                model=self._model, messages=messages, temperature=self._temperature, max_tokens=max_tokens
            )
        except OpenAIError as error:
            return error
        return (reply.choices[0].message.content if reply.choices else None) or AssistantError("an empty reply")


def _client(url: str, key_variable: str | None, retries: int, timeout_seconds: float) -> OpenAI:
    from openai import OpenAI

    key = os.environ[key_variable] if key_variable else "none"
    return OpenAI(base_url=url, api_key=key, max_retries=retries, timeout=timeout_seconds)


def _check_fields(text: str, name: str = "instruction") -> None:
    """ValueError unless ``text`` has the fields that show an original."""
    for field in ("{question}", "{response}"):
        if field not in text:
            raise ValueError(f"{name}={text[:60]!r}: must contain {field}")
