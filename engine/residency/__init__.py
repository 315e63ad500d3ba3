"""Keeping a model's weights in fast memory: warm-up, the standby pass between questions, wiring and locking."""
