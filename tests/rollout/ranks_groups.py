"""What the ranks of the group tests run: scripted responses, the reference backend, and samplers that hang."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spark_megatron import runtime
from spark_megatron.rollout.base import Request, Sampler
from spark_megatron.rollout.groups import Phase, sample_groups
from spark_megatron.rollout.lengths import ResponseLengths
from spark_megatron.rollout.scripted import ScriptedSampler
from spark_megatron.rollout.transformers import TransformersSampler
from spark_megatron.types import Group, Rollout, Task, Verdict

T = TypeVar("T")

STOPS = tuple(range(0, 301, 7))
RESPONSES = tuple(f"answer {i}" for i in range(50))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}",
    )


def check(groups: Sequence[Group]) -> list[Group]:
    """The reward of a response is its own number; any two checks of it agree."""
    return [
        replace(g, verdicts=tuple(Verdict("ok", float(r.text.split()[1]) / 50) for r in g.rollouts)) for g in groups
    ]


def scripted(tokenizer: PreTrainedTokenizerFast, responses: Sequence[str]) -> ScriptedSampler:
    return made(ScriptedSampler, tokenizer, responses)


def made(kind: type[T], tokenizer: PreTrainedTokenizerFast, responses: Sequence[str]) -> T:
    settings: dict[str, Any] = {"model": "", "dtype": "fp32", "stop_tokens": [1], "max_model_len": 128}
    return kind(tokenizer=tokenizer, responses=responses, **settings)


SETTINGS: dict[str, Any] = {"n": 4, "temperature": 1.0, "max_new_tokens": 24, "seed": (3, "solve"), "timeout_s": 60.0}


def asked(sampler: Sampler, tasks: Sequence[Task], lengths: ResponseLengths, **changed: Any) -> Phase:
    return sample_groups(sampler, byte_tokenizer(), tasks, check, lengths, **{**SETTINGS, **changed})


@dataclass(frozen=True)
class Answers:
    """What one rank saw."""

    all_tasks: Phase
    one_task: Phase
    uneven: list[Phase]
    """Twice the same tasks, of which those of one kind have long responses."""
    shares: list[list[tuple[int, ...]]]
    """The seeds of this rank's requests in both, and in a run that goes on after the first."""
    without_room: Phase
    refused: str
    none_of_the_recycled: Phase
    nothing: Phase
    cut_off: Phase
    model: Phase


def everything(tasks: Sequence[Task], path: Path) -> Answers:
    sampler = scripted(byte_tokenizer(), RESPONSES)
    sampler.start_update()
    sampler.finish_update(5)
    fresh = ResponseLengths
    long = Task("long", "solve", "?" * 103, "1", "math", "?")
    recycled = replace(long, kind="judge_one", source="t0")
    try:
        asked(sampler, [long, recycled], fresh())
        refused = "sampled"
    except RuntimeError as error:
        refused = str(error)
    uneven, shares = both_kinds()
    return Answers(
        all_tasks=asked(sampler, tasks, fresh()),
        one_task=asked(sampler, tasks[:1], fresh()),
        uneven=uneven,
        shares=shares,
        without_room=asked(sampler, [tasks[0], long, *tasks[2:]], fresh()),
        refused=refused,
        none_of_the_recycled=asked(sampler, [recycled, recycled], fresh()),
        nothing=asked(sampler, [], fresh()),
        cut_off=asked(sampler, tasks, fresh(), max_new_tokens=9),
        model=of_a_model(tasks, path),
    )


class ByKind(ScriptedSampler):
    """Long responses where the prompt asks to explain. ``seeds`` are those of the last call."""

    seeds: tuple[int, ...] = ()

    def generate(self, requests: Sequence[Request]) -> list[tuple[Rollout, ...]]:
        self.seeds = tuple(request.seed for request in requests)
        return super().generate(requests)

    def _rollout(self, request: Request, index: int) -> Rollout:
        explain = "Explain" in self.tokenizer.decode(request.prompt)
        self.responses = ["answer 7 " + "x" * 14 if explain else "answer 7"]
        return super()._rollout(request, index)


def both_kinds() -> tuple[list[Phase], list[tuple[int, ...]]]:
    """All prompts are equally long, and kinds alternate."""
    texts: list[tuple[Any, str]] = [("solve", "Compute"), ("reflect", "Explain")]
    tasks = [Task(f"u{i}", *texts[i % 2], "1", "math", "?") for i in range(16)]
    sampler = made(ByKind, byte_tokenizer(), [])
    lengths, resumed = ResponseLengths(), ResponseLengths()
    first, first_share = asked(sampler, tasks, lengths), sampler.seeds
    resumed.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    second, second_share = asked(sampler, tasks, lengths), sampler.seeds
    asked(sampler, tasks, resumed)
    return [first, second], [first_share, second_share, sampler.seeds]


def of_a_model(tasks: Sequence[Task], path: Path) -> Phase:
    """Sampled by the reference backend; the texts of a random model say nothing."""
    tokenizer = byte_tokenizer()
    sampler = TransformersSampler(
        model=str(path), tokenizer=tokenizer, dtype="fp32", stop_tokens=STOPS, batch_size=8, max_model_len=128
    )
    sampler.load(load_file(path / "model.safetensors"))
    sampler.finish_update(1)
    return sample_groups(sampler, tokenizer, tasks, unread, ResponseLengths(), **SETTINGS)


def unread(groups: Sequence[Group]) -> list[Group]:
    return [replace(g, verdicts=tuple(Verdict("unparsed") for _ in g.rollouts)) for g in groups]


class Hanging(ScriptedSampler):
    """On rank 1 it never answers; when ``deaf``, it keeps the interpreter from all other threads meanwhile."""

    deaf = False

    def generate(self, requests: Sequence[Request]) -> list[tuple[Rollout, ...]]:
        if self.replica == 1 and self.deaf:
            ctypes.PyDLL(None).sleep(1000)
        elif self.replica == 1:
            time.sleep(1000)
        return super().generate(requests)


def hanging(tasks: Sequence[Task], deaf: bool) -> None:
    sampler = made(Hanging, byte_tokenizer(), RESPONSES)
    sampler.deaf = deaf
    with mock.patch.object(runtime, "_LAST_RESORT_S", 0.5):
        asked(sampler, tasks, ResponseLengths(), timeout_s=1.0)
