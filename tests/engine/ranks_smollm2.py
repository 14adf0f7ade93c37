"""What the rank of the SmolLM2 test runs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spark_megatron.data.packing import pack
from spark_megatron.engine import model as models
from spark_megatron.engine.local import place
from spark_megatron.engine.parallel import Layout, Parallel
from spark_megatron.engine.weights.placement import Placement
from spark_megatron.engine.weights.stream import load_hf
from spark_megatron.types import Sample


@torch.no_grad()
def logit_differences(model: Path, texts: list[str]) -> list[float]:
    """Per text, the largest logit difference between transformers and megatron-core, which has all in one batch."""
    parallel = Parallel(Layout())
    hf = models.read_config(model)
    [ours] = models.build(hf, parallel, torch.float32)
    load_hf(Placement(hf, [ours], parallel), model)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = [tuple(tokenizer.encode(text)) for text in texts]
    batch = pack([Sample(ids[:1], ids[1:], "sft", "cross_entropy") for ids in encoded], {"sft": 1.0}, 0)
    [local] = place([batch], parallel)
    hidden = ours(local.batch.tokens[None], None, None, packed_seq_params=local.packed)
    logits = (hidden[:, 0] @ ours.head().T).split([len(ids) for ids in encoded])
    expected = [theirs(torch.tensor([ids])).logits[0] for ids in encoded]
    return [(a - b).abs().max().item() for a, b in zip(logits, expected, strict=True)]
