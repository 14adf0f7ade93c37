"""The megatron-core training engine. Knows nothing of prompts, rewards, objectives or the sampler."""
