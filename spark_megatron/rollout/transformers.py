"""The reference backend: transformers with a plain sampling loop, a whole model per rank. Slow, and easy to check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spark_megatron import runtime
from spark_megatron.architecture import Architecture
from spark_megatron.rollout.base import Request
from spark_megatron.rollout.vllm_rows import vllm_rows
from spark_megatron.slices import Row, whole
from spark_megatron.types import Rollout

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class _Response:
    """A response in the making."""

    request: Request
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None


class TransformersSampler:
    """Samples with transformers' own forward pass and key-value cache.

    Args:
        model: HF directory with config.json.
        tokenizer: decodes responses.
        dtype: "fp32" or "bf16".
        stop_tokens: ids that end a response (kept in its tokens, not in its text).
        batch_size: sequences in one forward pass. Only prompts of equal length share one: there is no padding.
        max_model_len: prompt and response together, in tokens.
        read_weights: read the directory's own weights, as version 0; else they come from a trainer.
    """

    has_model = True
    tensor_parallel = 1
    cache_block = 0

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Any,
        dtype: str,
        stop_tokens: Sequence[int],
        batch_size: int,
        max_model_len: int,
        read_weights: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        with runtime.rng_preserved():
            if read_weights:
                made = AutoModelForCausalLM.from_pretrained(model, dtype=_DTYPES[dtype])
            else:
                made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=_DTYPES[dtype])
            self.model = made.eval().to(device)
        self.device, self.tokenizer = device, tokenizer
        self.stop_tokens, self.batch_size, self.max_model_len = frozenset(stop_tokens), batch_size, max_model_len
        self.weight_version = 0 if read_weights else -1
        self.replica, self.replicas = runtime.rank(), runtime.world_size()
        self._in_use = _in_use(self.model)

    def generate(self, requests: Sequence[Request]) -> list[tuple[Rollout, ...]]:
        """The continuations of each request.

        Raises:
            RuntimeError: no weights were loaded.
            ValueError: a prompt and its longest response are longer than ``max_model_len``.
        """
        if self.weight_version < 0:
            raise RuntimeError("the sampler holds no weights yet: hand them over before the first request")
        longest = max((len(r.prompt) + r.max_new_tokens for r in requests), default=0)
        if longest > self.max_model_len:
            raise ValueError(f"max_model_len={self.max_model_len}: a prompt and its response may take {longest} tokens")
        groups = [[self._response(request, i) for i in range(request.n)] for request in requests]
        by_length: dict[int, list[_Response]] = defaultdict(list)
        for response in (response for group in groups for response in group):
            by_length[len(response.request.prompt)].append(response)
        for responses in by_length.values():
            for start in range(0, len(responses), self.batch_size):
                self._continue(responses[start : start + self.batch_size])
        return [tuple(self._rollout(response) for response in group) for group in groups]

    def _response(self, request: Request, index: int) -> _Response:
        return _Response(request, torch.Generator(self.device).manual_seed(request.seed + index))

    @torch.no_grad()
    def _continue(self, responses: Sequence[_Response]) -> None:
        """Complete responses to prompts of one length. Those that have ended stay in the batch, unheeded."""
        ids = torch.tensor([response.request.prompt for response in responses], device=self.device)
        cache = None
        while not all(response.finish for response in responses):
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            rows = zip(responses, output.logits[:, -1].float(), strict=True)
            ids = torch.tensor([[self._next(response, logits)] for response, logits in rows], device=self.device)
            runtime.alive()

    def _next(self, response: _Response, logits: Tensor) -> int:
        """The next token under softmax(``logits`` [vocabulary] / temperature), or the likeliest at temperature 0."""
        request = response.request
        logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
        if request.temperature:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=response.generator))
        else:
            token = int(logprobs.argmax())
        if response.finish is None:
            response.tokens.append(token)
            response.logprobs.append(float(logprobs[token]))
            if token in self.stop_tokens:
                response.finish = "stop"
            elif len(response.tokens) == request.max_new_tokens:
                response.finish = "length"
        return token

    def _rollout(self, response: _Response) -> Rollout:
        assert response.finish is not None
        text = self.tokenizer.decode(response.tokens, skip_special_tokens=True)
        tokens, logprobs = tuple(response.tokens), tuple(response.logprobs)
        return Rollout(tokens, logprobs, text, response.finish, self.weight_version)

    def rows(self, model: Architecture) -> list[Row]:
        return whole(vllm_rows(model))

    def start_update(self) -> None:
        """Nothing to prepare."""

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy whole HF tensors into the model; ValueError for a name that it does not have."""
        for name, tensor in tensors.items():
            if name not in self._in_use:
                raise ValueError(f"the model has no tensor {name}")
            self._in_use[name][0].copy_(tensor)

    def finish_update(self, version: int) -> None:
        self.weight_version = version

    def differing(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows of the values in use, those of a tied head included, that are not exactly these."""
        found = {}
        for name, tensor in tensors.items():
            unequal = torch.stack([used != tensor.to(used) for used in self._in_use[name]]).any(0)
            if unequal.any():
                found[name] = unequal.reshape(len(unequal), -1).any(1)
        return found

    def sleep(self) -> None:
        """Keeps its memory."""

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Was never asleep."""

    def close(self) -> None:
        """Nothing to leave."""


def _in_use(model: Any) -> dict[str, list[Tensor]]:
    """Where the values of each HF tensor are: the first place is written, all are read."""
    places: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for hf, tensor in _parts(name, parameter.detach()):
            places[hf].append(tensor)
    if model.config.tie_word_embeddings:
        places["model.embed_tokens.weight"] += places.pop("lm_head.weight")
    return dict(places)


def _parts(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter under its HF name; one that holds all experts of a layer as one view per HF tensor."""
    prefix, found, fused = name.partition(".experts.")
    if not found:
        yield name, parameter
        return
    for expert, weights in enumerate(parameter):
        projections = fused.removesuffix("_proj").split("_")  # "gate_up_proj": one behind the other
        for projection, part in zip(projections, weights.chunk(len(projections)), strict=True):
            yield f"{prefix}.experts.{expert}.{projection}_proj.weight", part
