"""Rotary position embeddings as transformers computes them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TYPES = ("default", "linear", "llama3", "yarn")
"""Values of ``rope_type`` whose frequencies are the same at every length of the sequence."""


def check(hf: PreTrainedConfig, path: Path) -> None:
    """ValueError for rotary embeddings that the engine would compute otherwise than transformers."""
    rope = hf.rope_parameters
    kind, share = rope.get("rope_type"), rope.get("partial_rotary_factor", 1.0)
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"{path} has rope_type={kind}, whose frequencies depend on the length of the sequence, so that the sampler "
            f"and the trainer could not agree; supported are {', '.join(TYPES)}"
        )
    if kind not in TYPES:
        raise ValueError(f"{path} has rope_type={kind}; supported are {', '.join(TYPES)}")
    if share != 1.0:
        raise ValueError(f"{path} has partial_rotary_factor={share}; only whole heads (1.0) are supported")


def frequencies(hf: PreTrainedConfig) -> tuple[Tensor | None, float]:
    """(inverse frequencies [head_dim / 2], the factor on cosine and sine); None where they are the plain powers of
    ``rope_theta``, which megatron-core computes itself."""
    kind = hf.rope_parameters["rope_type"]
    if kind == "default":
        return None, 1.0
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](hf)
    return inverse, float(factor)
