"""What a run says about itself: metrics, their sinks, recorded rollouts and the clock."""
