"""What the rank of the SmolLM2 test runs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spark_megatron.engine import model as models
from spark_megatron.engine.parallel import Parallel
from spark_megatron.engine.weights.stream import Placement, load_hf
from spark_megatron.engine.weights.table import table


@torch.no_grad()
def logit_differences(model: Path, texts: list[str]) -> list[float]:
    """The largest logit difference between megatron-core and transformers, per text."""
    parallel = Parallel(1, 1)
    hf = models.read_config(model)
    ours = models.build(hf, parallel, torch.float32)
    load_hf(Placement(table(hf), ours, parallel, hf.num_hidden_layers), model)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    batches = [torch.tensor([tokenizer.encode(text)]) for text in texts]
    return [(ours(ids, None, None) - theirs(ids).logits).abs().max().item() for ids in batches]
