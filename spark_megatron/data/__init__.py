"""Tasks from their sources, and the way from tasks and rollouts to batches of tokens."""
