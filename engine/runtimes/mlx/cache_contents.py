"""The contents of the caches of one row as bytes, and caches made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.runtimes.mlx.cache import LayerCache, RowCache, StateCache, evaluate
from engine.runtimes.row_contents import Bytes, Fill, RowContents, RowPart

_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def contents_of(caches: Sequence[LayerCache], checkpoint: Sequence[LayerCache] = ()) -> RowContents:
    """The filled positions of the keys and values of each layer, or its state; after all of them the states of
    ``checkpoint``, whose keys and values are the first ones of these."""
    found: list[Any] = []
    for cache in caches:
        if isinstance(cache, RowCache):
            found += [stored[:, :, : cache.offset - cache.start] for stored in cache.arrays]
        else:
            found += cache.arrays
    found += [array for cache in checkpoint if isinstance(cache, StateCache) for array in cache.arrays]
    names = _names(caches, bool(checkpoint))

    def read(index: int) -> Bytes:
        numbers = mx.contiguous(found[index]).reshape(-1)
        return np.array(numbers.view(mx.uint8))

    parts = [RowPart(name, _NAMES[each.dtype], tuple(each.shape)) for name, each in zip(names, found, strict=True)]
    return RowContents(parts, read)


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
    """What a checkpoint has in place of ``cache``."""
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
