"""Building the megatron-core model that a HF directory describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from spark_megatron.engine import platform
from spark_megatron.engine.parallel import Parallel

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of ``model_type`` in a HF config.json that the weight table and this builder know."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RMSNorm(torch.nn.RMSNorm):
    """megatron-core's constructor signature around torch's RMSNorm (its own wrapper refuses sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (an attribute of megatron-core)


class CausalAttention(MegatronModule):
    """Core attention through torch's scaled_dot_product_attention: causal, grouped query heads, right-padded rows.

    Padding needs no mask: it lies to the right of every real token, so causality hides it.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *_args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = kwargs.get("softmax_scale")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **kwargs: Any) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, kv heads, d] -> [s, b, heads * d]."""
        if kwargs.get("packed_seq_params") is not None:
            raise ValueError("CausalAttention takes padded rows, not packed sequences")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def read_config(directory: str | Path) -> PreTrainedConfig:
    """The HF config of a model directory; ValueError for a missing directory or an unsupported model."""
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise ValueError(f"model directory {path} has no config.json: give a HF model directory")
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in FAMILIES:
        raise ValueError(f"{path}/config.json has model_type={config.model_type}; supported are {', '.join(FAMILIES)}")
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}/config.json has rope_type={rope['rope_type']}; only 'default' is supported")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", False):
        raise ValueError(f"{path}/config.json uses sliding-window attention, which is not supported")
    return config


def head_dim(hf: PreTrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def padded_vocab(hf: PreTrainedConfig, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary, rounded up so that every tensor-parallel rank has the same number."""
    return -(-hf.vocab_size // tensor_parallel) * tensor_parallel


def transformer_config(hf: PreTrainedConfig, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of the model; fusions that need CUDA extensions are off without CUDA."""
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.layout.tensor,
        pipeline_model_parallel_size=parallel.layout.pipeline,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one that allows variable lengths; unused in dense models
        batch_p2p_sync=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def layer_specs(config: TransformerConfig) -> TransformerBlockSubmodules:
    """megatron-core's local layer with the norm and the core attention of this module."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(module=CausalAttention)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)


def build(hf: PreTrainedConfig, parallel: Parallel, dtype: torch.dtype) -> GPTModel:
    """This rank's part of the model, uninitialised (weights come through the weight table)."""
    platform.install()
    config = transformer_config(hf, parallel, dtype)
    model = GPTModel(
        config,
        layer_specs(config),
        vocab_size=padded_vocab(hf, parallel.layout.tensor),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel.first_stage,
        post_process=parallel.last_stage,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
    )
    return model.to(platform.device())
