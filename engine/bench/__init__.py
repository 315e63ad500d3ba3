"""Measurements of a loaded model: the costs of decoding, prefill, beams and experts."""
