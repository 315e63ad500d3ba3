"""What one layer keeps of rows of equal length, on mlx-lm's own caches: keys and values, or a state.

Layers with keys and values keep their positions in order, also those that attend to a sliding window. Truncating
therefore only moves the offset, for all families. mlx-lm's rotating cache keeps no more than the window, and could not
be cut back; here what no window reaches is dropped when the rows' user asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from engine.errors import ModelError

Array = Any
Place = Any
"""A moment of a cache: the number of its positions, or the arrays that it had."""


class RowCache(KVCache):  # type: ignore[misc]
    """Keys and values [rows, heads, capacity, size] of the positions from ``start`` to ``offset``.

    ``window``: the layer's queries see that many positions, themselves included; None: all, and ``start`` stays 0.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.start = 0

    @property
    def shortest_cut(self) -> int:
        """The smallest ``offset`` whose queries still find all that they see."""
        return self.start + self.window - 1 if self.start and self.window is not None else 0

    def forget_unseen(self, length: int) -> None:
        """Drop what no query at ``length`` or later sees, if that is worth a copy of the rest."""
        first = self._first_seen(length)
        dropped = first - self.start
        if dropped < self.step:
            return
        self.keys, self.values = (self._copied(stored, stored.shape[0], dropped) for stored in self.arrays)
        self.start = first

    def _first_seen(self, position: int) -> int:
        """The oldest position that the query at ``position`` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        first = self._first_seen(self.offset) - self.start
        self.offset -= self.start  # mlx-lm's is the place in the buffer, too
        keys, values = super().update_and_fetch(keys, values)
        self.offset += self.start
        return (keys[..., first:, :], values[..., first:, :]) if first else (keys, values)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for ``count`` new positions over what :meth:`update_and_fetch` will return."""
        if self.window is None:
            return super().make_mask(count, return_array=return_array, window_size=window_size)
        if count == 1:
            return None
        return create_causal_mask(count, self.offset - self._first_seen(self.offset), window_size=self.window)

    @property
    def arrays(self) -> list[Array]:
        """What it holds."""
        return [] if self.keys is None else [self.keys, self.values]

    @property
    def place(self) -> Place:
        """What :meth:`go_back` needs to forget all that comes after now."""
        return int(self.offset)

    def go_back(self, place: Place) -> None:
        self.offset = place

    def copy_rows(self, rows: int) -> RowCache:
        """A new cache of ``rows`` rows, each like the only one of this. Shares no memory."""
        copy = RowCache(self.window)
        copy.start, copy.offset = self.start, self.offset
        if self.keys is not None:
            copy.keys, copy.values = (self._copied(stored, rows) for stored in (self.keys, self.values))
        return copy

    def _copied(self, stored: Array, rows: int, dropped: int = 0) -> Array:
        """``rows`` rows like ``stored`` without its first ``dropped`` positions, and with room for some more."""
        _, heads, _, size = stored.shape
        end = self.offset - self.start
        capacity = ((end - dropped) // self.step + 1) * self.step
        new = mx.zeros((rows, heads, capacity, size), stored.dtype)
        new[:, :, : end - dropped] = stored[:, :, dropped:end]
        return new

    def bytes_per_position(self) -> int:
        """Bytes that one position of one row takes."""
        return sum(int(s.shape[1] * s.shape[3] * s.dtype.size) for s in self.arrays)

    def state_bytes(self) -> int:
        """Bytes of what one row keeps whatever its length."""
        return 0

    def row_bytes(self) -> int:
        """Bytes of what one row keeps now."""
        return int(self.offset - self.start) * self.bytes_per_position()


class StateCache(ArraysCache):  # type: ignore[misc]
    """The ``count`` arrays [rows, ...] that every pass replaces: the state of a delta-net or a short convolution.

    It cannot be truncated, only go back to a place where the arrays of before are still known.
    """

    window = None

    def __init__(self, count: int) -> None:
        super().__init__(count)

    def __setitem__(self, index: int, array: Array) -> None:
        # mlx-lm may give a slice, which would keep the whole chunk of a prompt alive.
        super().__setitem__(index, mx.contiguous(array))

    @property
    def arrays(self) -> list[Array]:
        """What it holds."""
        return [array for array in self.cache if array is not None]

    @property
    def place(self) -> Place:
        """What :meth:`go_back` needs to forget all that comes after now. Arrays do not change, so none is copied."""
        return list(self.cache)

    def go_back(self, place: Place) -> None:
        self.cache = list(place)

    def copy_rows(self, rows: int) -> StateCache:
        """A new cache of ``rows`` rows, each like the only one of this."""
        copy = StateCache(len(self.cache))
        copy.cache = [None if array is None else mx.repeat(array, rows, axis=0) for array in self.cache]
        return copy

    def bytes_per_position(self) -> int:
        return 0

    def state_bytes(self) -> int:
        """Bytes of what one row keeps whatever its length."""
        return sum(int(array.nbytes) // int(array.shape[0]) for array in self.arrays)

    def row_bytes(self) -> int:
        return self.state_bytes()


LayerCache = RowCache | StateCache


def cache_makers(model: Any, window: int | None) -> list[Callable[[], LayerCache]]:
    """For each layer of an mlx-lm model what makes its empty cache.

    ``window`` is the sliding window of the layers that the definition takes for full attention; None: they see all.
    Raises ModelError for a model that keeps something else.
    """
    makers: list[Callable[[], LayerCache]] = []
    for cache in make_prompt_cache(model):
        if type(cache) is RotatingKVCache:
            makers.append(partial(RowCache, int(cache.max_size)))
        elif type(cache) is KVCache:
            makers.append(partial(RowCache, window))
        elif type(cache) is ArraysCache:
            makers.append(partial(StateCache, len(cache.cache)))
        else:
            raise ModelError(f"the mlx runtime cannot keep a {type(cache).__name__}: choose the torch runtime")
    return makers


def evaluate(caches: Sequence[LayerCache]) -> None:
    """Computes whatever is pending in ``caches``."""
    mx.eval([array for cache in caches for array in cache.arrays])


def move_rows(caches: Sequence[LayerCache], parents: Sequence[int], first: int, length: int) -> int:
    """Row i of each cache becomes row ``parents[i]``: keys and values from position ``first`` to ``length``, where they
    differ, and states as a whole.

    Returns the bytes moved.
    """
    changed = [row for row, parent in enumerate(parents) if row != parent]
    if not changed or length <= first:
        return 0
    sources = mx.array([parents[row] for row in changed])
    kept = [cache for cache in caches if isinstance(cache, RowCache)]
    places = [slice(first - cache.start, length - cache.start) for cache in kept]
    moved = [
        mx.take(stored[:, :, place], sources, axis=0)
        for cache, place in zip(kept, places, strict=True)
        for stored in cache.arrays
    ]
    # Evaluated before the rows are overwritten: nothing else then holds the old buffers, and the writes are in place.
    mx.eval(moved)
    pending = iter(moved)
    for cache, place in zip(kept, places, strict=True):
        keys, values = next(pending), next(pending)
        for position, row in enumerate(changed):
            cache.keys[row, :, place] = keys[position]
            cache.values[row, :, place] = values[position]
    states = [cache for cache in caches if isinstance(cache, StateCache)]
    everyone = mx.array(list(parents))
    for state in states:
        state.cache = [None if array is None else mx.take(array, everyone, axis=0) for array in state.cache]
    return sum(int(array.nbytes) for array in moved) + len(changed) * sum(state.state_bytes() for state in states)
