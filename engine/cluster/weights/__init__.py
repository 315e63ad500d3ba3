"""Weights that travel between machines, and the shards that machines keep."""
