"""Sampling backends behind one protocol (``base.Sampler``)."""
