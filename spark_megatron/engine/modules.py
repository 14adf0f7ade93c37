"""Parts of the model that this project brings, where megatron-core's own need CUDA or hold too much memory."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from spark_megatron.engine.kernels import collect, rms_norm, spread
from spark_megatron.engine.local import Packed
from spark_megatron.engine.platform import product_dtype


class RMSNorm(torch.nn.RMSNorm):
    """An RMSNorm with megatron-core's constructor (its own wrapper of torch's refuses sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (an attribute of megatron-core)

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class PackedRotary(torch.nn.Module):
    """In place of megatron-core's rotary embedding: cosines and sines of packed tokens, made once per micro-batch."""

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq

    def get_rotary_seq_len(self, *args: Any, **_unused: Any) -> Packed:
        """megatron-core gives what this returns to ``forward``; its last argument describes the packed sequences."""
        packed = args[-1]
        assert isinstance(packed, Packed)
        return packed

    def forward(self, packed: Packed, **_unused: Any) -> Tensor:
        """[2, tokens, 1, head_dim / 2] in fp32, for ``kernels.rotate``."""
        assert packed.positions is not None
        angles = torch.outer(packed.positions.float(), self.inv_freq)[:, None]
        return torch.stack([angles.cos(), angles.sin()])


class PackedAttention(MegatronModule):
    """Core attention over packed sequences through torch's scaled_dot_product_attention: causal, grouped query heads.

    Sequences of similar length are laid side by side for the attention alone. With context parallelism keys and values
    are gathered from all context ranks, which is exact and simple, and costs memory for one layer's keys and values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **kwargs: Any) -> Tensor:
        """query [tokens, heads, d], key and value [tokens, kv heads, d] -> [tokens, heads * d]."""
        packed = kwargs["packed_seq_params"]
        assert isinstance(packed, Packed)
        assert packed.query_cells is not None
        assert packed.key_cells is not None
        if self.context_group is not None:
            both = torch.cat([key, value], -1)
            both = gather_from_sequence_parallel_region(both, group=self.context_group)
            key, value = both.chunk(2, -1)
        dtype = product_dtype(query)
        query_rows = spread(query.to(dtype), packed.query_cells, [(r.rows, r.queries) for r in packed.rectangles])
        keys = [(r.rows, r.keys) for r in packed.rectangles]
        key_rows, value_rows = (spread(x.to(dtype), packed.key_cells, keys) for x in (key, value))
        outputs = []
        for rectangle, q, k, v in zip(packed.rectangles, query_rows, key_rows, value_rows, strict=True):
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=rectangle.mask,
                is_causal=rectangle.mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return collect(torch.cat(outputs), packed.query_cells).to(query.dtype)


class Decoder(GPTModel):
    """A GPTModel whose last stage returns hidden states: the head is applied in pieces, see ``logprobs``."""

    def _postprocess(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states

    def head(self) -> Tensor:
        """[vocabulary / tp, hidden]: this rank's rows of the output layer (of the embedding where they are tied); of a
        scalar head [1, hidden]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
