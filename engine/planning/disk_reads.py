"""What a forward pass reads from the disk where memory does not hold all experts. Pure.

The system keeps the pages that were used last. If a token uses an expert with the probability p, and pages that were
not used for T tokens are gone, the expert is in memory with the probability 1 - exp(-p T), and T is such that what is
in memory fills it (the approximation of Che, Tung and Wang for caches that replace the least recently used).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.planning.prediction import ModelSizes

UNSEEN_ROUTES = 0.5
"""Number of routes added to every expert's count, so that one that was never used is not taken for useless."""
MAKING_ROOM_S = 3.5e-10
"""Seconds of processor time for each byte that is read while memory is full, besides the disk's: other pages are
chosen, unmapped and dropped, and the new ones mapped. 2.8e-10 to 5.5e-10 follow from what ``benchmarks.beyond_memory``
printed before this was counted."""
_HALVINGS = 60
"""Number of steps in which the time after which pages are gone is narrowed down."""


def bytes_from_disk(model: ModelSizes, room: int, rows: int, popularity: Sequence[Sequence[int]] = ()) -> float:
    """Bytes that a pass of ``rows`` tokens reads from the disk, if memory has ``room`` bytes for pages of the files.

    A trunk that is mapped and does not fit is read whole: every pass reads it in the same order, so each page is
    replaced just before it is wanted again. ``popularity``: routes counted before, [MoE layer][expert], or nothing.
    """
    trunk = model.trunk_read_bytes if model.trunk_is_mapped and model.trunk_read_bytes > max(0, room) else 0
    if not model.slab_bytes:
        return trunk
    if model.trunk_is_mapped:
        room -= model.trunk_read_bytes
    uses = uses_per_token(model.experts, model.experts_per_token, model.moe_layers, popularity)
    missing = missing_chances(uses, max(0, room) / model.slab_bytes)
    return trunk + experts_read(uses, missing, rows) * model.slab_bytes


def seconds_from_disk(nbytes: float, disk_read: float) -> float:
    """Time of reading ``nbytes`` into full memory from a disk that gives ``disk_read`` bytes per second."""
    return nbytes / disk_read + nbytes * MAKING_ROOM_S


def uses_per_token(
    experts: int, per_token: int, layers: int, popularity: Sequence[Sequence[int]] = ()
) -> list[list[float]]:
    """The probability with which a token uses each expert, [layer][expert].

    ``popularity``: routes counted before, [layer][expert]; without any, or for a layer without, even use.
    """
    if not experts:
        return []
    even = [min(1.0, per_token / experts)] * experts
    if not popularity:
        return [even] * layers
    found = []
    for row in popularity:
        total = sum(row) + UNSEEN_ROUTES * len(row)
        found.append([min(1.0, per_token * (count + UNSEEN_ROUTES) / total) for count in row] if sum(row) else even)
    return found


def missing_chances(uses: Sequence[Sequence[float]], slots: float) -> list[list[float]]:
    """The probability that each expert is not in memory when it is wanted, if memory holds ``slots`` of them."""
    everything = sum(len(layer) for layer in uses)
    if slots >= everything:
        return [[0.0] * len(layer) for layer in uses]
    if slots <= 0:
        return [[1.0] * len(layer) for layer in uses]
    # An expert of every token is there after one, so no time is longer than the rarest expert needs.
    low, high = 0.0, 1.0
    while _held(uses, high) < slots and high < 1e18:
        high *= 2.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _held(uses, middle) < slots else (low, middle)
    return [[math.exp(-use * high) for use in layer] for layer in uses]


def _held(uses: Sequence[Sequence[float]], tokens: float) -> float:
    return sum(1.0 - math.exp(-use * tokens) for layer in uses for use in layer)


def experts_read(uses: Sequence[Sequence[float]], missing: Sequence[Sequence[float]], rows: int) -> float:
    """Experts that a pass of ``rows`` tokens is expected to read from the disk."""
    return sum(
        chance * (1.0 - (1.0 - use) ** rows)
        for layer, absent in zip(uses, missing, strict=True)
        for use, chance in zip(layer, absent, strict=True)
    )
