"""The sizes of a decoder model, and which parallel layouts they allow: arithmetic on a config.json, no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type`` in a Hugging Face config.json that the engine knows."""

SCALAR = "ForSequenceClassification"
"""How the class names (``architectures``) of models with a scalar head end."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. The data-parallel degree is what is left of the world.

    ``virtual`` is the number of model chunks that each pipeline rank holds (1: no interleaving). ``sequence`` splits
    activations between tensor-parallel regions over the tensor-parallel ranks. Experts are spread over ``expert``
    ranks, which are ranks of the data (and context) parallel dimension for everything else; within an expert the
    tensor-parallel degree is ``tensor`` too.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert", "virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name}={getattr(self, name)} must be at least 1")
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual={self.virtual} needs pipeline stages, but parallel.pipeline=1: set one of them"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence=true needs parallel.tensor of 2 or more: there is nothing to split over"
            )

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the model and its context."""
        return self.tensor * self.pipeline * self.context

    def data(self, world: int) -> int:
        """Data-parallel degree of ``world`` ranks; ValueError where the layout does not fit."""
        if world % self.model:
            raise ValueError(
                f"parallel.tensor={self.tensor} * parallel.pipeline={self.pipeline} * parallel.context={self.context} "
                f"does not divide parallel.ranks={world}: choose degrees whose product does"
            )
        data = world // self.model
        if (data * self.context) % self.expert:
            raise ValueError(
                f"parallel.expert={self.expert} does not divide the {data * self.context} data and context ranks that "
                f"parallel.ranks={world} leaves: choose a degree that does"
            )
        return data


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model. ``head_dim`` is the config's own: heads * head_dim need not be ``hidden``."""

    family: str
    layers: int
    hidden: int
    heads: int
    groups: int
    """Key-value heads; each serves ``heads // groups`` query heads."""
    head_dim: int
    ffn: int
    """Width of a dense layer's MLP."""
    vocab: int
    tied: bool
    """Whether the head is the embedding."""
    scalar: bool
    """Whether the head is one score per sequence, read at its last token, rather than logits of the vocabulary."""
    experts: int
    """Of each sparse layer; 0 in a dense model."""
    experts_per_token: int
    expert_ffn: int
    sparse: tuple[bool, ...]
    """Per layer: whether its MLP is a mixture of experts."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """The sizes in a config.json (or in ``PreTrainedConfig.to_dict()``); KeyError names a missing one."""
        layers, hidden, heads = (config[k] for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        experts = 0
        if config["model_type"] == "qwen3_moe":
            # transformers 5 writes the second name, older ones the first.
            experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
        scalar = any(name.endswith(SCALAR) for name in config.get("architectures") or ())
        dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
        return cls(
            family=config["model_type"],
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False) and not scalar,
            scalar=scalar,
            experts=experts,
            experts_per_token=config["num_experts_per_tok"] if experts else 0,
            expert_ffn=config["moe_intermediate_size"] if experts else 0,
            sparse=tuple(experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(layers)),
        )

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    def padded_vocab(self, tensor: int) -> int:
        """Rows of embedding and head: the vocabulary, rounded up so that every tensor-parallel rank has as many."""
        return -(-self.vocab // tensor) * tensor

    def ends_count(self, layout: Layout) -> bool:
        """Whether embedding and head each take the place of a layer in the pipeline: where the layers do not divide
        over the stages, and two more would (the 126 layers of Llama-3.1-405B on 16 stages)."""
        stages = layout.pipeline * layout.virtual
        return self.layers % stages != 0 and (self.layers + 2) % stages == 0 and self.layers + 2 >= 2 * stages

    def check(self, layout: Layout) -> None:
        """ValueError names the setting and the size of the model that do not fit."""
        tensor, expert = layout.tensor, layout.expert
        if not self.ends_count(layout):
            _divides("parallel.pipeline * parallel.virtual", layout.pipeline * layout.virtual, "layers", self.layers)
        _divides("parallel.tensor", tensor, "attention heads", self.heads)
        if self.groups % tensor and tensor % self.groups:
            raise ValueError(
                f"parallel.tensor={tensor} neither divides the model's {self.groups} key-value heads nor is a multiple "
                "of them: choose a degree that does or is"
            )
        _divides("parallel.tensor", tensor, "query, key and value rows", (self.heads + 2 * self.groups) * self.head_dim)
        if not all(self.sparse):
            _divides("parallel.tensor", tensor, "MLP width (intermediate_size)", self.ffn)
        if expert > 1 and not self.experts:
            raise ValueError(f"parallel.expert={expert}, but the model has no experts: set parallel.expert=1")
        if self.experts:
            _divides("parallel.expert", expert, "experts", self.experts)
            _divides("parallel.tensor", tensor, "expert width (moe_intermediate_size)", self.expert_ffn)
            if tensor > 1 and not layout.sequence:
                raise ValueError(
                    f"parallel.sequence=false with parallel.tensor={tensor}: megatron-core trains experts under tensor "
                    "parallelism only with sequence parallelism: set parallel.sequence=true"
                )


def _divides(setting: str, degree: int, what: str, size: int) -> None:
    if size % degree:
        raise ValueError(f"{setting}={degree} does not divide the model's {size} {what}: choose a degree that does")
