"""Hostile inputs by the thousand, seeded: what a stranger, a paired machine, a model file or a model may send."""
