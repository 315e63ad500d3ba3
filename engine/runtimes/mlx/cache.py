"""The cache of one layer for rows of equal length, built on mlx-lm's own caches: keys and values, or a state.

Layers with keys and values keep their positions in order, even with a sliding window, so truncating only moves the
offset. mlx-lm's rotating cache keeps only the window and could not be cut back. Here positions outside all windows are
dropped when the rows' user asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from engine.errors import ModelError
from engine.runtimes.protocol import Bytes, Fill, RowArray, RowPart

Array = Any
Place = Any
"""A point to which a cache can return: its number of positions, or its arrays."""


class RowCache(KVCache):  # type: ignore[misc]
    """Keys and values [rows, heads, capacity, size] of the positions from ``start`` to ``offset``.

    ``window``: number of positions that the layer's queries see, themselves included; None: all, and ``start`` stays 0.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.start = 0
        self.ends: Array | None = None
        """The position before which each of the next ones sees, [positions], if they see further than themselves."""

    @property
    def shortest_cut(self) -> int:
        """The smallest ``offset`` whose queries still find all positions that they see."""
        return self.start + self.window - 1 if self.start and self.window is not None else 0

    def forget_unseen(self, length: int) -> None:
        """Drop the positions that no query at ``length`` or later sees, if that is worth a copy of the rest."""
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
        if self.window is None and self.ends is None:
            return super().make_mask(count, return_array=return_array, window_size=window_size)
        if count == 1:
            return None
        first = self._first_seen(self.offset)
        mask = create_causal_mask(count, self.offset - first, window_size=self.window)
        if self.ends is None:
            return mask
        seen = mx.arange(first, self.offset + count)
        new = mx.arange(self.offset, self.offset + count)[:, None]
        return mask | ((seen >= new) & (seen < self.ends[:, None]))

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the cache."""
        return [] if self.keys is None else [self.keys, self.values]

    @property
    def place(self) -> Place:
        """The current point, for :meth:`go_back`."""
        return int(self.offset)

    def go_back(self, place: Place) -> None:
        self.offset = place

    def copy_rows(self, rows: int) -> RowCache:
        """A new cache with ``rows`` copies of this cache's only row. It shares no memory."""
        copy = RowCache(self.window)
        copy.start, copy.offset = self.start, self.offset
        if self.keys is not None:
            copy.keys, copy.values = (self._copied(stored, rows) for stored in (self.keys, self.values))
        return copy

    def _copied(self, stored: Array, rows: int, dropped: int = 0) -> Array:
        """``rows`` copies of ``stored`` without its first ``dropped`` positions, with some free room."""
        _, heads, _, size = stored.shape
        end = self.offset - self.start
        capacity = ((end - dropped) // self.step + 1) * self.step
        new = mx.zeros((rows, heads, capacity, size), stored.dtype)
        new[:, :, : end - dropped] = stored[:, :, dropped:end]
        return new

    def bytes_per_position(self) -> int:
        """Bytes of one position in one row."""
        return sum(int(s.shape[1] * s.shape[3] * s.dtype.size) for s in self.arrays)

    def state_bytes(self) -> int:
        """Bytes of one row's state, which do not depend on its length."""
        return 0

    def row_bytes(self) -> int:
        """Bytes of one row now."""
        return int(self.offset - self.start) * self.bytes_per_position()


class StateCache(ArraysCache):  # type: ignore[misc]
    """A cache of ``count`` arrays [rows, ...] that every pass replaces: the state of a delta-net or a short
    convolution.

    It cannot be truncated, only go back to a point whose arrays are still known.
    """

    window = None

    def __init__(self, count: int) -> None:
        super().__init__(count)

    def __setitem__(self, index: int, array: Array) -> None:
        # mlx-lm may give a slice, which would keep the whole chunk of a prompt alive.
        super().__setitem__(index, mx.contiguous(array))

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the cache."""
        return [array for array in self.cache if array is not None]

    @property
    def place(self) -> Place:
        """The current point, for :meth:`go_back`. Arrays do not change, so none is copied."""
        return list(self.cache)

    def go_back(self, place: Place) -> None:
        self.cache = list(place)

    def copy_rows(self, rows: int) -> StateCache:
        """A new cache with ``rows`` copies of this cache's only row."""
        copy = StateCache(len(self.cache))
        copy.cache = [None if array is None else mx.repeat(array, rows, axis=0) for array in self.cache]
        return copy

    def bytes_per_position(self) -> int:
        return 0

    def state_bytes(self) -> int:
        """Bytes of one row's state, which do not depend on its length."""
        return sum(int(array.nbytes) // int(array.shape[0]) for array in self.arrays)

    def row_bytes(self) -> int:
        return self.state_bytes()


LayerCache = RowCache | StateCache


def cache_makers(model: Any, window: int | None) -> list[Callable[[], LayerCache]]:
    """Functions that make the empty cache of each layer of an mlx-lm model.

    ``window``: sliding window of the layers that the definition treats as full attention; None: they see everything.
    Raises ModelError for a model with another kind of cache.
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
    """Compute all pending values in ``caches``."""
    mx.eval([array for cache in caches for array in cache.arrays])


def move_rows(caches: Sequence[LayerCache], parents: Sequence[int], first: int, length: int) -> int:
    """Make row i of each cache row ``parents[i]``: keys and values from position ``first`` to ``length``, and whole
    states.

    Returns the bytes moved.
    """
    changed = [row for row, parent in enumerate(parents) if row != parent]
    if not changed or length <= first:
        return 0
    sources = mx.array([parents[row] for row in changed])
    row_caches = [cache for cache in caches if isinstance(cache, RowCache)]
    places = [slice(first - cache.start, length - cache.start) for cache in row_caches]
    moved = [
        mx.take(stored[:, :, place], sources, axis=0)
        for cache, place in zip(row_caches, places, strict=True)
        for stored in cache.arrays
    ]
    # Evaluated before the rows are overwritten: nothing else then holds the old buffers, and the writes are in place.
    mx.eval(moved)
    pending = iter(moved)
    for cache, place in zip(row_caches, places, strict=True):
        keys, values = next(pending), next(pending)
        for position, row in enumerate(changed):
            cache.keys[row, :, place] = keys[position]
            cache.values[row, :, place] = values[position]
    states = [cache for cache in caches if isinstance(cache, StateCache)]
    everyone = mx.array(list(parents))
    for state in states:
        state.cache = [None if array is None else mx.take(array, everyone, axis=0) for array in state.cache]
    return sum(int(array.nbytes) for array in moved) + len(changed) * sum(state.state_bytes() for state in states)


# --- contents of a row as bytes --------------------------------------------------------------------------------------


_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


def contents_of(caches: Sequence[LayerCache], checkpoint: Sequence[LayerCache] = ()) -> list[RowArray]:
    """The filled positions of the keys and values of each layer, or its state; after all of them the states of
    ``checkpoint``, whose keys and values are the first ones of these."""
    arrays: list[Any] = []
    for cache in caches:
        if isinstance(cache, RowCache):
            arrays += [stored[:, :, : cache.offset - cache.start] for stored in cache.arrays]
        else:
            arrays += cache.arrays
    arrays += [array for cache in checkpoint if isinstance(cache, StateCache) for array in cache.arrays]
    named = zip(_names(caches, bool(checkpoint)), arrays, strict=True)
    return [RowArray.of(name, array, _bytes_of) for name, array in named]


def _bytes_of(array: Array) -> Bytes:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8))


def restored_caches(
    makers: Sequence[Callable[[], LayerCache]], length: int, begun: int, parts: Sequence[RowPart], fill: Fill
) -> tuple[list[LayerCache], list[LayerCache] | None]:
    """Caches of one row of ``length`` tokens with the contents ``parts``, whose bytes ``fill`` gives in order, and
    those of its checkpoint after ``begun`` tokens (0: none).

    Raises ValueError if ``parts`` are not those of such caches, and what ``fill`` raises.
    """
    caches = [make() for make in makers]
    if begun > length or (begun and all(isinstance(cache, RowCache) for cache in caches)):
        raise ValueError(f"a row of {length} tokens has no checkpoint after {begun}")
    if [part.name for part in parts] != list(_names(caches, begun > 0)):
        raise ValueError("the layers of the model keep other parts")
    for part in parts:
        if part.numbers not in _DTYPES or not part.shape or part.shape[0] != 1:
            raise ValueError(f"{part.name} of the shape {part.shape} are not those of {length} tokens")
    expected = iter(parts)
    for cache in caches:
        own = [next(expected) for _ in (("keys", "values") if isinstance(cache, RowCache) else cache.place)]
        if isinstance(cache, RowCache):
            cache.offset = length
            cache.start = _start(own, length, None if begun else cache.window)
    given = iter(parts)
    for cache in caches:
        if isinstance(cache, RowCache):
            cache.keys, cache.values = (_with_room(_filled(next(given), fill), cache.step) for _ in range(2))
        else:
            cache.go_back([_filled(next(given), fill) for _ in cache.place])
    evaluate(caches)
    if not begun:
        return caches, None
    saved = [_begun(cache, begun, given, fill) for cache in caches]
    evaluate(saved)
    return caches, saved


def _start(parts: Sequence[RowPart], length: int, window: int | None) -> int:
    """The first position of the keys and values ``parts``, which end after ``length`` tokens. Raises ValueError if they
    have others, or a pass would not find the ``window`` that it sees (None: everything)."""
    positions = {part.shape[2] if len(part.shape) == 4 else 0 for part in parts}
    least = length if window is None else min(length, window - 1)
    if len(positions) != 1 or not least <= min(positions) <= length:
        raise ValueError(f"{parts[0].name} of the shape {parts[0].shape} are not those of {length} tokens")
    return length - min(positions)


def _names(caches: Sequence[LayerCache], with_checkpoint: bool) -> Iterator[str]:
    """The names of the parts, in order."""
    for layer, cache in enumerate(caches):
        kinds = ("keys", "values") if isinstance(cache, RowCache) else [f"state {i}" for i in range(len(cache.place))]
        yield from (f"{layer} {kind}" for kind in kinds)
    for layer, cache in enumerate(caches if with_checkpoint else ()):
        if isinstance(cache, StateCache):
            yield from (f"{layer} begun {i}" for i in range(len(cache.place)))


def _begun(cache: LayerCache, begun: int, parts: Iterator[RowPart], fill: Fill) -> LayerCache:
    """The cache of a checkpoint that belongs to ``cache``."""
    if isinstance(cache, RowCache):
        first = RowCache(cache.window)
        first.offset, first.keys, first.values = begun, cache.keys, cache.values
        return first.copy_rows(1)
    state = StateCache(len(cache.place))
    state.go_back([_filled(next(parts), fill) for _ in cache.place])
    return state


def _filled(part: RowPart, fill: Fill) -> Any:
    content = np.empty(part.nbytes, np.uint8)
    fill(content)
    return mx.array(content).view(_DTYPES[part.numbers]).reshape(part.shape)


def _with_room(stored: Any, step: int) -> Any:
    """``stored`` [rows, heads, length, width] with room for some more positions, as mlx-lm makes it."""
    rows, heads, length, width = stored.shape
    room = mx.zeros((rows, heads, (length // step + 1) * step, width), stored.dtype)
    room[:, :, :length] = stored
    return room
