"""Training loops: each one can be read on one screen."""
