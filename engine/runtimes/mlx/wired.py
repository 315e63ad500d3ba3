"""Wiring of mlx's weights: the GPU memory that macOS must not take away, and touching the weights so that it does not.

The wired limit belongs to the process. It is what this node's weights, keys and values need, with a reserve for the
system (:func:`engine.planning.residency.wiring`), set when a model is loaded and restored when it is closed.
"""

from __future__ import annotations

import atexit
import platform
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten

from engine.planning.residency import Wiring, wiring

Array = Any

RESIDENCY_SETS = 15
"""First version of macOS in which the limit has an effect, as it belongs to a residency set, which older ones lack."""


class WiredLimit:
    """The wired limit of this process. ``set_limit(bytes)`` returns the former limit."""

    def __init__(self, set_limit: Any = None) -> None:
        self._set = set_limit or mx.set_wired_limit
        self._before: int | None = None
        self._wanted = 0
        self.refused_said = False
        """Whether the person was told that this system does not wire memory."""

    @property
    def is_set(self) -> bool:
        return self._before is not None

    def set(self, nbytes: int) -> None:
        """Set the limit, once until it is restored. The former limit is remembered. Raises what mlx raises for a limit
        it refuses."""
        mx.clear_cache()  # Buffers that nothing uses would be wired, too, in place of weights.
        before = self._set(nbytes)
        self._wanted = nbytes
        if self._before is None:
            self._before = int(before)

    def hold(self, wanted: bool) -> None:
        """Switch to the chosen limit (``wanted``) or back to the one before, until the next call.

        Without a limit nothing changes.
        """
        if self._before is None:
            return
        if wanted:
            mx.clear_cache()
        self._set(self._wanted if wanted else self._before)

    def restore(self) -> None:
        """Set the limit as it was before. May be called twice."""
        before, self._before = self._before, None
        if before is not None:
            self._set(before)


LIMIT = WiredLimit()
atexit.register(LIMIT.restore)


def wire(share: int, key_values: int) -> tuple[bool, str]:
    """Wire ``share`` bytes of weights and room for ``key_values``.

    Returns whether all weights are wired, and a line for the person if something is not. Without a GPU in mlx, nothing
    is wired and there is no line.
    """
    if mx.default_device() != mx.gpu:
        return False, ""
    if _macos() < RESIDENCY_SETS:
        return False, _said_of_old_macos()
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    memory = int(info.get("memory_size") or psutil.virtual_memory().total)
    wiring_plan = wiring(share, key_values, memory, None if recommended is None else int(recommended))
    try:
        LIMIT.set(wiring_plan.limit)
    except (RuntimeError, ValueError) as error:
        return False, f"No memory is kept wired for the weights ({error}): the first token after a pause may be slow."
    return wiring_plan.limit >= share, said_of(wiring_plan, share)


def _said_of_old_macos() -> str:
    """A line for the person, returned only once per process."""
    if LIMIT.refused_said:
        return ""
    LIMIT.refused_said = True
    return f"macOS {_macos()} keeps no memory wired: the first token after a pause may be slow."


def _macos() -> int:
    """The major version of macOS. On other systems, the oldest one that keeps memory wired."""
    version = platform.mac_ver()[0].partition(".")[0]
    return int(version) if version.isdecimal() else RESIDENCY_SETS


def said_of(wiring_plan: Wiring, share: int) -> str:
    """A line for the person; empty if everything is wired."""
    if not wiring_plan.short:
        return ""
    what = "the weights" if wiring_plan.limit < share else "keys and values"
    return (
        f"{wiring_plan.limit / 1e9:.1f} GB are kept wired, {wiring_plan.short / 1e9:.1f} GB of {what} are not: "
        "the system keeps a reserve, and the first token after a pause may be slow."
    )


class MlxWeights:
    """See :class:`engine.runtimes.protocol.Weights`. Each array is a piece, and summing it touches all of its
    memory."""

    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = arrays
        self.own_memory = mx.default_device() == mx.gpu
        """Whether weights are in the GPU's memory. On a CPU nobody unwires them."""

    @property
    def sizes(self) -> list[int]:
        return [int(array.nbytes) for array in self._arrays]

    def touch(self, index: int) -> None:
        mx.eval(self._arrays[index].sum())

    def resident(self, index: int) -> bool:
        return not self.own_memory

    def close(self) -> None:
        self._arrays = []


def arrays_of(model: Any | None, experts: Mapping[int, Any]) -> list[Array]:
    """All weights: those of the trunk ``model``, if there is one, then those of ``experts`` (modules by layer)."""
    modules = [*([] if model is None else [model]), *(experts[layer] for layer in sorted(experts))]
    return [array for module in modules for _, array in tree_flatten(module.parameters())]
