"""What the schedules of coefficients and weights share."""

from __future__ import annotations


def progress(step: int, total_steps: int) -> float:
    """How far a run is, from 0 at step 0 to 1 at its last step (``total_steps - 1``) and after it.

    A run of a single step stays at 0. ValueError for a negative step or a run without steps.
    """
    if step < 0 or total_steps < 1:
        raise ValueError(f"step={step} must be >= 0 and total_steps={total_steps} must be >= 1")
    return min(step / (total_steps - 1), 1.0) if total_steps > 1 else 0.0


def between(start: float, end: float, share: float) -> float:
    """The number that lies ``share`` of the way from ``start`` to ``end``; exact at both ends."""
    return (1 - share) * start + share * end
