"""Measuring a loaded model: what it costs to decode, to read a prompt, to step beams, and what its experts cost."""
