"""The mathematics of the objective: advantages, KL, schedules, token losses. Tensors and numbers in, the same out."""
