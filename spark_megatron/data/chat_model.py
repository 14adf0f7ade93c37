"""A chat model behind an OpenAI-compatible address, such as one that ``vllm serve`` offers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI


class ChatModelError(RuntimeError):
    """No request was answered."""


class ChatModel:
    """Answers many messages at a time, each by itself.

    Args:
        url: base address, ending in /v1.
        model: its name there.
        system: what the model is told to do.
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
        temperature: float,
        concurrency: int,
        retries: int,
        timeout_seconds: float,
        key_variable: str | None,
    ) -> None:
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds={timeout_seconds}: must be greater than 0")
        if key_variable is not None and not os.environ.get(key_variable):
            raise ValueError(f"key_variable={key_variable}: there is no such environment variable; export it, or null")
        self._url, self._model, self._system, self._temperature = url, model, system, temperature
        self._concurrency, self._retries, self._timeout = concurrency, retries, timeout_seconds
        self._key_variable = key_variable

    def replies(self, messages: Sequence[str], max_tokens: Sequence[int]) -> list[str | None]:
        """The replies to the user's turns, in order; None for one that was not answered.

        Raises:
            ChatModelError: not one was answered; says why the first was not.
        """
        from openai import OpenAI

        key = os.environ[self._key_variable] if self._key_variable else "none"
        with (
            OpenAI(base_url=self._url, api_key=key, max_retries=self._retries, timeout=self._timeout) as client,
            ThreadPoolExecutor(self._concurrency) as pool,
        ):
            replies = list(pool.map(partial(self._reply, client), messages, max_tokens))
        if replies and not any(isinstance(reply, str) for reply in replies):
            raise ChatModelError(f"none of {len(replies)} requests to {self._url} was answered: {replies[0]}")
        return [reply if isinstance(reply, str) else None for reply in replies]

    def _reply(self, client: OpenAI, message: str, max_tokens: int) -> str | Exception:
        from openai import OpenAIError

        turns: Any = [{"role": "system", "content": self._system}, {"role": "user", "content": message}]
        try:
            reply = client.chat.completions.create(
                model=self._model, messages=turns, temperature=self._temperature, max_tokens=max_tokens
            )
        except OpenAIError as error:
            return error
        return (reply.choices[0].message.content if reply.choices else None) or ChatModelError("an empty reply")
