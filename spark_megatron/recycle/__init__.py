"""From verified groups of rollouts to new tasks: judging one answer, judging a pair, reflecting."""
