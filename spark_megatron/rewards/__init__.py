"""From a response to a verdict: answer extraction, verifiers and the scoring of groups."""
