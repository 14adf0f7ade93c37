"""Building the megatron-core model that a HF directory describes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from spark_megatron.architecture import FAMILIES, Architecture
from spark_megatron.engine import kernels, platform, rope
from spark_megatron.engine.modules import Decoder, PackedAttention, PackedRotary, RMSNorm
from spark_megatron.engine.parallel import Layout, Parallel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_config(directory: str | Path, *, scalar: bool = False) -> PreTrainedConfig:
    """The HF config of a model directory; ``scalar`` makes that of a language model one of a scorer of sequences.

    Raises:
        ValueError: a missing directory or an unsupported model.
    """
    path = Path(directory)
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"model directory {path} has no config.json: give a HF model directory")
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in FAMILIES:
        raise ValueError(f"{file} has model_type={config.model_type}; supported are {', '.join(FAMILIES)}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", False):
        raise ValueError(f"{file} uses sliding-window attention, which is not supported")
    for key, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        value = getattr(config, key, supported)
        if value != supported:
            raise ValueError(f"{file} has {key}={value}; only {supported} is supported")
    rope.check(config, file)
    has_score = Architecture.of(config.to_dict()).scalar
    if has_score and config.num_labels != 1:
        raise ValueError(f"{file} has {config.num_labels} labels; a model that scores has one")
    return _with_score_head(config) if scalar and not has_score else config


def _with_score_head(config: PreTrainedConfig) -> PreTrainedConfig:
    """A language model's config, changed into that of transformers' classifier with one label on the same body."""
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config.model_type]]
    config.num_labels = 1
    if config.pad_token_id is None:  # without one, transformers takes no batches
        ends = config.eos_token_id
        config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return config


def drawn_head(config: PreTrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """The HF tensor of a new scalar head, drawn as transformers does; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {"score.weight": torch.randn(1, config.hidden_size, generator=generator) * config.initializer_range}


def fused_layers() -> bool:
    """Whether layers are Transformer Engine's on this machine rather than megatron-core's own."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(
    hf: PreTrainedConfig, layout: Layout, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """megatron-core's configuration of the model; ValueError if the layout does not fit it."""
    model = Architecture.of(hf.to_dict())
    model.check(layout)
    factor = rope.frequencies(hf)[1]
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # A factor on cosine and sine of queries and keys is its square on the scores, with any kernel for the rotation.
        softmax_scale=None if factor == 1.0 else factor**2 / model.head_dim**0.5,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        account_for_embedding_in_pipeline_split=model.ends_count(layout),
        account_for_loss_in_pipeline_split=model.ends_count(layout),
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        sequence_parallel=layout.sequence,
        # Interleaved pipelines of two stages send forwards and backwards between the same two ranks at once.
        # megatron-core keeps the two apart with unbatched messages of a known size, not when it exchanges sizes first.
        variable_seq_lengths=layout.virtual == 1,
        batch_p2p_comm=layout.virtual == 1,
        num_moe_experts=model.experts or None,
        moe_layer_freq=[int(sparse) for sparse in model.sparse],
        moe_ffn_hidden_size=model.expert_ffn or None,
        moe_router_topk=model.experts_per_token or 2,
        # Probabilities of the chosen experts add up to 1 where the softmax is over them alone.
        moe_router_pre_softmax=not getattr(hf, "norm_topk_prob", True),
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",  # the only one that allows variable lengths
        moe_grouped_gemm=fused_layers() and model.experts > 0,
        batch_p2p_sync=False,
        use_cpu_initialization=device.type != "cuda",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=not torch.cuda.is_available(),  # by ``kernels.swiglu``
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def layer_specs(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """The layers of a chunk: Transformer Engine's, or megatron-core's with the norms and the attention of this
    project."""
    block = get_gpt_decoder_block_spec(config, fused_layers(), normalization="RMSNorm", vp_stage=chunk)
    if fused_layers():
        return block
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


def build(
    hf: PreTrainedConfig, parallel: Parallel, dtype: torch.dtype, device: torch.device | None = None
) -> list[Decoder]:
    """This rank's part of the model, one chunk per virtual pipeline stage, uninitialised (see ``weights.stream``).

    Args:
        device: where to make the parameters, that of the platform by default; "meta" makes their shapes alone.

    Raises:
        ValueError: the layout does not fit the model.
    """
    platform.install()
    kernels.install()
    layout, device = parallel.layout, device or platform.device()
    config, model = transformer_config(hf, layout, dtype, device), Architecture.of(hf.to_dict())
    inverse = rope.frequencies(hf)[0]
    chunks = []
    for chunk in range(layout.virtual):
        stage = chunk if layout.virtual > 1 else None
        with device:
            decoder = Decoder(
                config,
                layer_specs(config, stage),
                vocab_size=model.padded_vocab(layout.tensor),
                max_sequence_length=hf.max_position_embeddings,
                pre_process=parallel.holds_first(chunk),
                post_process=parallel.holds_last(chunk),
                share_embeddings_and_output_weights=model.tied,
                position_embedding_type="rope",
                rotary_base=hf.rope_parameters["rope_theta"],
                vp_stage=stage,
            )
            if model.scalar and decoder.post_process:
                decoder.output_layer = torch.nn.Linear(model.hidden, 1, bias=False, dtype=dtype)
        if inverse is not None:
            decoder.rotary_pos_emb.inv_freq = inverse
        if not torch.cuda.is_available():
            decoder.rotary_pos_emb = PackedRotary(decoder.rotary_pos_emb.inv_freq)
        chunks.append(decoder.to(device))
    return chunks
