"""The mapping between HF checkpoints and megatron-core parameters, and the streams derived from it."""
