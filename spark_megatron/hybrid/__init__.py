"""The only package that sees the training engine and the sampler together."""
