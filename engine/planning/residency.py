"""Decisions about wired and locked memory, and about touching weights. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_RESERVE = 8 * 10**9
RESERVE_SHARE = 0.25
"""Share of the memory left to the system, at least SMALLEST_RESERVE bytes. Wiring all memory panics macOS."""
LOCKED_SHARE = 0.8
"""Maximum share of the available memory that is locked."""

WARM_UP_SHARE = 0.5
STANDBY_SHARE = 0.05
"""Share of a core's (or the GPU's) time for touching weights between questions. WARM_UP_SHARE applies at the start."""
UNWIRED_AFTER_S = 0.25
"""Seconds between two standby passes: half of the 512 ms after which the paper's driver unwires prestacked weights
(section 3.2, finding 2)."""
EVICTED_AFTER_S = 30.0
"""Seconds between two standby passes over pages of files, which the system drops when it needs the memory."""

LET_GO_AFTER_S = 300.0
LET_GO_ON_BATTERY_S = 30.0
"""Seconds without a question after which weights are released on battery power, so that the GPU may rest."""


@dataclass(frozen=True)
class Wiring:
    """A limit of ``limit`` wired bytes, and the bytes of weights, keys and values that it leaves out (``short``)."""

    limit: int
    short: int


def wiring(share: int, key_values: int, memory: int, recommended: int | None) -> Wiring:
    """The limit of wired memory on Apple Silicon for a node's weights (``share``) and its keys and values, in bytes.

    A reserve of ``memory`` is left. The limit never exceeds the GPU's ``recommended`` working set (None: not known).
    """
    wanted = max(0, share) + max(0, key_values)
    room = max(0, memory - max(SMALLEST_RESERVE, round(RESERVE_SHARE * memory)))
    limit = min(wanted, room if recommended is None else min(room, recommended))
    return Wiring(limit, wanted - limit)


def lockable(wanted: int, allowed: int | None, available: int) -> int:
    """Bytes to lock, of ``wanted``: at most what the process is ``allowed`` (None: anything), and a share of the
    available memory."""
    room = int(LOCKED_SHARE * max(0, available))
    return max(0, min(wanted, room if allowed is None else min(room, allowed)))


def touchable(sizes: list[int], available: int) -> int:
    """Number of pieces, in order, that fit in the available memory. Touching more would push out the first ones."""
    room = LOCKED_SHARE * max(0, available)
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return count
    return len(sizes)


def pause_after(seconds: float, share: float) -> float:
    """Seconds to rest after ``seconds`` of touching, so that touching takes ``share`` of the time."""
    return seconds * (1.0 / share - 1.0)


def standby_period(pass_s: float, wired: bool, own_memory: bool) -> float | None:
    """Seconds between the starts of two standby passes, if one takes ``pass_s``; None: none is needed.

    ``own_memory``: the weights are in a GPU driver's memory, which unwires what is not used, unless they are ``wired``.
    Otherwise they are pages of files.
    """
    if wired:
        return None
    return max(UNWIRED_AFTER_S if own_memory else EVICTED_AFTER_S, pass_s / STANDBY_SHARE)


def lets_go(idle_s: float, on_battery: bool) -> bool:
    """Whether weights in a GPU driver's memory are released ``idle_s`` seconds after the last question.

    Touching them, or keeping them wired, keeps the GPU from resting. A ring's nodes never release them, because others
    would wait.
    """
    return idle_s >= (LET_GO_ON_BATTERY_S if on_battery else LET_GO_AFTER_S)
