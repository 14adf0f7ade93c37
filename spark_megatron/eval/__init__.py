"""Held-out evaluation of solving, judging and reflecting."""
