"""Measurements of this machine, and the files that keep them."""
