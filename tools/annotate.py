"""Label completions where the rule verifier and a language model agree, for the cold start of a reward model.

    vllm serve Qwen/Qwen3-4B --served-model-name judge
    python tools/annotate.py candidates.jsonl triples.jsonl --url http://127.0.0.1:8000/v1 --model judge

The input has one JSON object a line: question, reference_answer, completion. The output has those with a label, 0 or 1,
that were agreed on. Decisions are kept in triples.jsonl.decisions as they come: the same command goes on where it was
stopped, and asks again only about what was not answered.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from spark_megatron.data.annotation import INSTRUCTION, Candidate, agreed, read_judgement
from spark_megatron.data.chat_model import ChatModel, ChatModelError
from spark_megatron.data.jsonl import read_rows
from spark_megatron.rewards.isolation import SymbolicChecker
from spark_megatron.rewards.math import MathVerifier
from spark_megatron.types import Task

Decisions = dict[str, int | None]
"""Label by id of the candidate; None where rule and model do not agree."""


def known(path: Path) -> Decisions:
    """The decisions of earlier runs. A line that was not written to its end is asked about again."""
    found: Decisions = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["id"]] = row["label"]
    return found


def decide(candidates: Sequence[Candidate], model: ChatModel, rule: MathVerifier, max_tokens: int) -> Decisions:
    """One decision per candidate that the model answered."""
    replies = model.replies([c.message for c in candidates], [max_tokens] * len(candidates))
    decisions: Decisions = {}
    for candidate, reply in zip(candidates, replies, strict=True):
        if reply is not None:
            task = Task(candidate.id, "solve", "", candidate.reference, "math", candidate.question)
            label = agreed(rule(task, candidate.completion, "stop"), read_judgement(reply))
            decisions[candidate.id] = None if label is None else int(label)
    return decisions


def write(candidates: Sequence[Candidate], decisions: Decisions, out: Path) -> None:
    """The labelled candidates, in their order; the file is whole at any moment."""
    rows = [
        {"question": c.question, "reference_answer": c.reference, "completion": c.completion, "label": decisions[c.id]}
        for c in candidates
        if decisions.get(c.id) is not None
    ]
    unfinished = out.with_name(f"{out.name}.unfinished")
    unfinished.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    unfinished.replace(out)


def annotate(
    candidates: Sequence[Candidate], out: Path, model: ChatModel, rule: MathVerifier, args: argparse.Namespace
) -> Decisions:
    """All decisions, old and new; new ones are on disk chunk by chunk."""
    log = out.with_name(f"{out.name}.decisions")
    decisions = known(log)
    left = [c for c in candidates if c.id not in decisions]
    print(f"{len(candidates) - len(left)} of {len(candidates)} are decided already", file=sys.stderr)
    begin = time.monotonic()
    with log.open("a", encoding="utf-8") as stream:
        if log.stat().st_size and not log.read_bytes().endswith(b"\n"):
            stream.write("\n")
        for start in range(0, len(left), args.chunk):
            new = decide(left[start : start + args.chunk], model, rule, args.max_tokens)
            stream.writelines(json.dumps({"id": key, "label": label}) + "\n" for key, label in new.items())
            stream.flush()
            decisions |= new
            done = min(start + args.chunk, len(left))
            seconds = (time.monotonic() - begin) / done * (len(left) - done)
            kept = sum(label is not None for label in decisions.values())
            print(f"{done}/{len(left)} asked, {kept} agreed so far, {seconds:.0f} s left", file=sys.stderr)
    return decisions


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("candidates", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", required=True, help="base address of an OpenAI-compatible server, ending in /v1")
    parser.add_argument("--model", required=True, help="the name of the model there")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a reply")
    parser.add_argument("--chunk", type=int, default=256, help="completions between two writes to disk")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument("--timeout-seconds", type=float, default=120.0)
    parser.add_argument("--key-variable", help="environment variable that holds the key, where one is needed")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        candidates = list(
            {c.id: c for where, row in read_rows(str(args.candidates)) for c in [Candidate.of(row, where)]}.values()
        )
        model = ChatModel(
            url=args.url, model=args.model, system=INSTRUCTION, temperature=0.0, concurrency=args.concurrency,
            retries=args.retries, timeout_seconds=args.timeout_seconds, key_variable=args.key_variable,
        )  # fmt: skip
        rule = MathVerifier(symbolic=SymbolicChecker(timeout_seconds=5.0, start_seconds=120.0, memory_gib=4.0))
        decisions = annotate(candidates, args.out, model, rule, args)
    except (OSError, ValueError, ChatModelError) as error:
        sys.exit(f"annotate: {error}")
    write(candidates, decisions, args.out)
    counts = Counter("no label" if label is None else str(label) for label in decisions.values())
    missing = sum(c.id not in decisions for c in candidates)
    print(f"{args.out}: {counts['1']} right, {counts['0']} wrong; {counts['no label']} not agreed on")
    if missing:
        sys.exit(f"annotate: {missing} were not answered: run the same command again")


if __name__ == "__main__":
    main()
