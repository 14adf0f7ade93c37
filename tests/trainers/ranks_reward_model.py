"""What the ranks of the tests of the reward model run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from spark_megatron.data.pairs import Pair
from spark_megatron.data.triples import Triple
from spark_megatron.engine.engine import Engine
from spark_megatron.engine.optim import OptimSettings
from spark_megatron.engine.parallel import Layout
from spark_megatron.tracking.hacking import HackingMonitor
from spark_megatron.trainers.reward_model import RewardModel
from spark_megatron.types import Group
from tests import training_rows as step
from tests.engine.ranks_engine import exported, layout

LAYOUTS = {"dp2": Layout(), "tp2": Layout(tensor=2), "pp2": Layout(pipeline=2), "cp2": Layout(context=2)}


def on_all_layouts(
    path: str, out: Path, groups: Sequence[Group], pairs: Sequence[Pair], triples: Sequence[Triple]
) -> dict[str, Any]:
    answers = {}
    for name, degrees in LAYOUTS.items():
        with layout(degrees) as parallel:
            settings = OptimSettings(**step.OPTIM | {"decay": "constant", "lr": 1e-3, "min_lr": 0.0})
            engine = Engine(
                path, parallel, torch.float32, settings, bucket_bytes=1 << 20, logits_bytes=1 << 20, score_seed=0
            )
            judge = RewardModel(
                engine,
                AutoTokenizer.from_pretrained(path),
                assistant=lambda *_: [],
                triples=None,  # type: ignore[arg-type] # the loop takes them
                max_tokens=256,
                released=("optimizer", "gradients", "parameters"),
                monitor=HackingMonitor(rise=0.1, drop=0.1),
            )
            answers[name] = asked(judge, groups, pairs, triples)
            engine.save_hf(out / name)
    return answers


def asked(
    judge: RewardModel, groups: Sequence[Group], pairs: Sequence[Pair], triples: Sequence[Triple]
) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    with judge.awake():
        answer["start"] = judge.probabilities(groups)
        answer["none"] = judge.probabilities([])
        before = exported(judge.engine)
        answer["nothing"] = judge.learn_pairs([], 0.0)
        answer["moved_by_nothing"] = [n for n, x in exported(judge.engine).items() if not torch.equal(x, before[n])]
    with judge.awake():
        answer["pairs"] = [judge.learn_pairs(pairs, 0.0) for _ in range(3)]
        answer["anchored"] = judge.learn_pairs(pairs, 0.5)
        answer["labels"] = judge.learn_labels(triples)
        judge.longest = 80
        answer["short"] = judge.probabilities(groups)
        answer["cut"] = judge.learn_pairs(pairs, 0.0)["too_long"]
    return answer
