"""Keeping a model's weights in fast memory: warm-up, standby passes between questions, wiring and locking."""
