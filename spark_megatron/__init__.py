"""Post-training of language models with SPARK and Cooper on megatron-core and vLLM."""

__version__ = "0.1.0"
