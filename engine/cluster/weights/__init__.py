"""Weights between machines, and the shares they keep."""
