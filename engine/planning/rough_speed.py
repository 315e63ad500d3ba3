"""A rough prediction of decoding speed for a model that is not on this machine yet, of which only a few figures are
known."""

from __future__ import annotations

ASSUMED_MEMORY_READ = 20e9
"""Bytes per second at which a processor streams memory, for a machine that was not measured: a laptop of the middle
class."""
DECODING_SHARE = 0.75
"""Fraction of the streaming rate at which decoding one token reads its weights: 0.77 to 0.92 were measured."""


def rough_tokens_per_s(weight_bytes: float, active_share: float, memory_read: float) -> float:
    """Tokens per second if a token takes what streaming its weights takes.

    ``weight_bytes`` are the model's, of which a token uses ``active_share``. ``memory_read`` is in bytes per second;
    0.0 stands for a machine that was not measured. Raises ValueError for a model without weights.
    """
    read = weight_bytes * active_share
    if read <= 0:
        raise ValueError(f"a token reads {read:g} bytes of weights; it must read some")
    return DECODING_SHARE * (memory_read or ASSUMED_MEMORY_READ) / read
