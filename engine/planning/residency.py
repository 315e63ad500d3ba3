"""How much memory is wired or locked, and how often weights are touched: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_RESERVE = 8 * 10**9
RESERVE_SHARE = 0.25
"""Share of the memory left to the system, at least SMALLEST_RESERVE bytes: wiring all of it panics macOS."""
LOCKED_SHARE = 0.8
"""Largest share of the available memory that is locked."""

WARM_UP_SHARE = 0.5
STANDBY_SHARE = 0.05
"""Share of one core's (or the GPU's) time for touching weights between questions; WARM_UP_SHARE is for the start."""
UNWIRED_AFTER_S = 0.25
"""Time between two standby passes in seconds: half of the 512 ms after which the paper's driver unwires prestacked
weights (section 3.2, finding 2)."""
EVICTED_AFTER_S = 30.0
"""Time between two standby passes over pages of files in seconds. The system drops them when it needs the memory."""

LET_GO_AFTER_S = 300.0
LET_GO_ON_BATTERY_S = 30.0
"""Time in seconds without a question after which the weights are let go, so that the GPU may rest; on battery."""


@dataclass(frozen=True)
class Wiring:
    """``limit`` bytes may be wired; ``short`` is how much of the weights and of keys and values that leaves out."""

    limit: int
    short: int


def wiring(share: int, key_values: int, memory: int, recommended: int | None) -> Wiring:
    """How much to wire on Apple Silicon: this node's weights (``share``) and its keys and values, in bytes, a reserve
    of ``memory`` left; never more than the ``recommended`` working set of the GPU (None: not known)."""
    wanted = max(0, share) + max(0, key_values)
    room = max(0, memory - max(SMALLEST_RESERVE, round(RESERVE_SHARE * memory)))
    limit = min(wanted, room if recommended is None else min(room, recommended))
    return Wiring(limit, wanted - limit)


def lockable(wanted: int, allowed: int | None, available: int) -> int:
    """How many of ``wanted`` bytes to lock: what this process is ``allowed`` (None: anything), and at most a share of
    the memory that is available."""
    room = int(LOCKED_SHARE * max(0, available))
    return max(0, min(wanted, room if allowed is None else min(room, allowed)))


def touchable(sizes: list[int], available: int) -> int:
    """How many of the pieces, in order, fit in the memory that is available: more would push out the first ones."""
    room = LOCKED_SHARE * max(0, available)
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return count
    return len(sizes)


def pause_after(seconds: float, share: float) -> float:
    """How long to rest after ``seconds`` of touching, such that it takes ``share`` of the time."""
    return seconds * (1.0 / share - 1.0)


def standby_period(pass_s: float, wired: bool, own_memory: bool) -> float | None:
    """Seconds between the beginnings of two standby passes, of which one took ``pass_s``; None: none is needed.

    ``own_memory``: the weights are in a GPU driver's memory, which unwires what is not used, unless they are ``wired``;
    otherwise they are pages of files.
    """
    if wired:
        return None
    return max(UNWIRED_AFTER_S if own_memory else EVICTED_AFTER_S, pass_s / STANDBY_SHARE)


def lets_go(idle_s: float, on_battery: bool) -> bool:
    """Whether weights in a GPU driver's memory are neither touched nor kept wired any more, ``idle_s`` seconds after
    the last question: touching them keeps the GPU from resting. Not for a node of a ring, which others wait for."""
    return idle_s >= (LET_GO_ON_BATTERY_S if on_battery else LET_GO_AFTER_S)
