"""Tiny random models of every supported family, made so that errors show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 301
"""Odd, so that two tensor-parallel ranks need a padded row."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_QWEN3 = {**_SHAPE, "hidden_size": 64, "head_dim": 32}
"""Heads of 32 although hidden / heads is 16: the config's own head_dim must be read."""

_MOE: dict[str, Any] = {
    **_SHAPE,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def _rope(**settings: Any) -> dict[str, Any]:
    """A context of 256 made from one of 32, so that short sequences reach beyond the original one."""
    scaled: dict[str, Any] = {"rope_theta": 5000.0, "factor": 8.0}
    if settings["rope_type"] != "linear":
        scaled["original_max_position_embeddings"] = 32
    return {**_SHAPE, "max_position_embeddings": 256, "rope_parameters": {**scaled, **settings}}


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama_deep": LlamaConfig(**{**_SHAPE, "num_hidden_layers": 6}, tie_word_embeddings=False),
    "llama3": LlamaConfig(
        **_rope(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0), tie_word_embeddings=False
    ),
    "llama_linear": LlamaConfig(**_rope(rope_type="linear"), tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen2_untied": Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen2_yarn": Qwen2Config(**_rope(rope_type="yarn"), tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_QWEN3, tie_word_embeddings=True),
    "qwen3_yarn": Qwen3Config(
        **{**_rope(rope_type="yarn", attention_factor=1.3, beta_fast=16.0), "head_dim": 32}, tie_word_embeddings=False
    ),
    "qwen3_moe": Qwen3MoeConfig(**{**_MOE, "num_hidden_layers": 2}, tie_word_embeddings=False),
    # Layer 1 is dense, and the weights of the chosen experts do not add up to 1.
    "qwen3_moe_mixed": Qwen3MoeConfig(
        **{**_MOE, "num_experts_per_tok": 3, "norm_topk_prob": False, "mlp_only_layers": [1]}, tie_word_embeddings=True
    ),
}


def save(name: str, directory: Path, seed: int) -> None:
    """Write the model's HF directory. Weights are large enough, and norms and biases uneven enough, to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(4)
    model.save_pretrained(directory)


def load(directory: Path) -> Any:
    """The model through transformers, in fp32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def response_logprobs(
    model: Any, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float
) -> torch.Tensor:
    """[tokens of the response]: transformers' log-probs under softmax(logits / temperature)."""
    ids = torch.tensor([prompt + response])
    logprobs = (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]
