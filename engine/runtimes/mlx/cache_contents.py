"""The contents of the caches of one row as bytes, and caches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.runtimes.mlx.cache import RowCache, evaluate
from engine.runtimes.row_contents import Bytes, Fill, RowContents, RowPart

_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def contents_of(caches: Sequence[RowCache]) -> RowContents:
    """The filled positions of the keys and values of each layer that has some."""
    found: list[tuple[str, Any]] = []
    for index, cache in enumerate(caches):
        if cache.keys is not None:
            for kind, stored in (("keys", cache.keys), ("values", cache.values)):
                found.append((f"{index} {kind}", stored[:, :, : cache.offset]))

    def read(index: int) -> Bytes:
        numbers = mx.contiguous(found[index][1]).reshape(-1)
        return np.array(numbers.view(mx.uint8))

    return RowContents([RowPart(name, _NAMES[stored.dtype], tuple(stored.shape)) for name, stored in found], read)


def fill_caches(caches: Sequence[RowCache], length: int, parts: Sequence[RowPart], fill: Fill) -> None:
    """Give the empty ``caches`` of one row the contents ``parts`` of ``length`` tokens, whose bytes ``fill`` gives.

    Raises ValueError if ``parts`` are not those of such caches, and what ``fill`` raises.
    """
    layers = [int(part.name.partition(" ")[0]) for part in parts[::2] if part.name.partition(" ")[0].isdecimal()]
    names = [f"{layer} {kind}" for layer in layers for kind in ("keys", "values")]
    if not parts or [part.name for part in parts] != names or layers != sorted(set(layers) & set(range(len(caches)))):
        raise ValueError("the layers of the model have other keys and values")
    for part in parts:
        if part.numbers not in _DTYPES or len(part.shape) != 4 or part.shape[0] != 1 or part.shape[2] != length:
            raise ValueError(f"{part.name} of the shape {part.shape} are not those of {length} tokens")
    for cache in caches:
        cache.offset = length
    for layer, keys, values in zip(layers, parts[::2], parts[1::2], strict=True):
        caches[layer].keys, caches[layer].values = (_filled(part, caches[layer].step, fill) for part in (keys, values))
    evaluate(caches)


def _filled(part: RowPart, step: int, fill: Fill) -> Any:
    """An array with room for some more positions, as mlx-lm makes them, whose first ones ``fill`` gives."""
    content = np.empty(part.nbytes, np.uint8)
    fill(content)
    rows, heads, length, width = part.shape
    room = mx.zeros((rows, heads, (length // step + 1) * step, width), _DTYPES[part.numbers])
    room[:, :, :length] = mx.array(content).view(_DTYPES[part.numbers]).reshape(part.shape)
    return room
