"""Keys and values of one layer for rows of equal length, on mlx-lm's growing cache.

All layers keep every position, also those that attend to a sliding window, which limits only what they read. Truncating
therefore only moves the offset, for all families. mlx-lm's rotating cache would use less memory, but could not be cut
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from engine.errors import ModelError

Array = Any


class RowCache(KVCache):  # type: ignore[misc]
    """Keys and values [rows, heads, capacity, size], the first ``offset`` positions of which are filled.

    ``window``: the layer's queries see that many positions, themselves included; None: all.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def _first_seen(self, position: int) -> int:
        """The oldest position that the query at ``position`` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        first = self._first_seen(self.offset)
        keys, values = super().update_and_fetch(keys, values)
        return (keys[..., first:, :], values[..., first:, :]) if first else (keys, values)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for ``count`` new positions over what :meth:`update_and_fetch` will return."""
        if self.window is None:
            return super().make_mask(count, return_array=return_array, window_size=window_size)
        if count == 1:
            return None
        return create_causal_mask(count, self.offset - self._first_seen(self.offset), window_size=self.window)

    def copy_rows(self, source: slice, rows: int) -> RowCache:
        """A new cache of ``rows`` rows holding ``source`` of this one's (one row is repeated). Shares no memory."""
        copy = RowCache(self.window)
        copy.offset = self.offset
        if self.keys is not None:
            copy.keys, copy.values = (self._copied(stored, source, rows) for stored in (self.keys, self.values))
        return copy

    def _copied(self, stored: Array, source: slice, rows: int) -> Array:
        _, heads, _, size = stored.shape
        capacity = (self.offset // self.step + 1) * self.step
        new = mx.zeros((rows, heads, capacity, size), stored.dtype)
        new[:, :, : self.offset] = stored[source, :, : self.offset]
        return new

    def bytes_per_position(self) -> int:
        """Bytes that one position of one row takes."""
        if self.keys is None:
            return 0
        return sum(int(s.shape[1] * s.shape[3] * s.dtype.size) for s in (self.keys, self.values))


def layer_windows(model: Any) -> list[int | None]:
    """The sliding window of each layer of an mlx-lm model, None for full attention.

    Raises ModelError for a model that keeps another kind of state.
    """
    windows: list[int | None] = []
    for cache in make_prompt_cache(model):
        if type(cache) is RotatingKVCache:
            windows.append(int(cache.max_size))
        elif type(cache) is KVCache:
            windows.append(None)
        else:
            raise ModelError(f"the mlx runtime cannot keep a {type(cache).__name__}: choose the torch runtime")
    return windows


def evaluate(caches: Sequence[RowCache]) -> None:
    """Computes whatever is pending in ``caches``."""
    mx.eval([stored for cache in caches if cache.keys is not None for stored in (cache.keys, cache.values)])


def move_rows(caches: Sequence[RowCache], parents: Sequence[int], first: int) -> int:
    """Row i of each cache becomes row ``parents[i]`` from position ``first`` on, where they differ.

    Returns the bytes moved.
    """
    changed = [row for row, parent in enumerate(parents) if row != parent]
    if not changed or caches[0].offset <= first:
        return 0
    sources = mx.array([parents[row] for row in changed])
    moved = [
        mx.take(stored[:, :, first : cache.offset], sources, axis=0)
        for cache in caches
        for stored in (cache.keys, cache.values)
    ]
    # Evaluated before the rows are overwritten: nothing else then holds the old buffers, and the writes are in place.
    mx.eval(moved)
    pending = iter(moved)
    for cache in caches:
        keys, values = next(pending), next(pending)
        for position, row in enumerate(changed):
            cache.keys[row, :, first : cache.offset] = keys[position]
            cache.values[row, :, first : cache.offset] = values[position]
    return sum(int(array.nbytes) for array in moved)
