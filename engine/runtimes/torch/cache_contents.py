"""The contents of a cache of one row as bytes, and a cache made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.runtimes.row_contents import Bytes, Fill, RowContents, RowPart
from engine.runtimes.torch.cache import AnyCache, KeyValueCache, room_for

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def contents_of(cache: AnyCache) -> RowContents:
    """The filled positions of each buffer, and the states."""
    tensors = _tensors(cache)
    parts = [RowPart(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors]

    def read(index: int) -> Bytes:
        with torch.inference_mode():
            here = tensors[index][1].cpu().contiguous()
        found: Bytes = here.reshape(-1).view(torch.uint8).numpy()
        return found

    return RowContents(parts, read)


def fill_cache(cache: AnyCache, length: int, parts: Sequence[RowPart], fill: Fill, device: torch.device) -> None:
    """Make the empty ``cache`` one of ``length`` tokens with the contents ``parts``, whose bytes ``fill`` gives.

    Raises ValueError if ``parts`` are not those of such a cache, and what ``fill`` raises.
    """
    slots = [_slot(cache, part, length) for part in parts]
    if len(set(slots)) != len(slots) or not slots:
        raise ValueError("parts of a row are there twice, or none is there")
    if {kind for _, kind in slots} & {"keys", "values"} and not all(
        ((layer, "keys") in slots) == ((layer, "values") in slots) for layer, _ in slots
    ):
        raise ValueError("a layer has keys without values")
    with torch.inference_mode():
        for (layer, kind), part in zip(slots, parts, strict=True):
            content = torch.empty(part.shape, dtype=_DTYPES[part.numbers])
            fill(content.reshape(-1).view(torch.uint8).numpy())
            if kind not in ("keys", "values"):
                assert not isinstance(cache, KeyValueCache)
                cache.states[layer, kind] = content.to(device)
                continue
            rows, heads, _, width = part.shape
            buffer = torch.empty((rows, heads, room_for(length), width), dtype=content.dtype, device=device)
            buffer[:, :, :length] = content
            setattr(cache.layers[layer], "key_buffer" if kind == "keys" else "value_buffer", buffer)
    cache.position.length = length


def _tensors(cache: AnyCache) -> list[tuple[str, torch.Tensor]]:
    """All that counts in ``cache``, as views."""
    length = cache.position.length
    found = []
    for index, layer in enumerate(cache.layers):
        for kind, buffer in (("keys", layer.key_buffer), ("values", layer.value_buffer)):
            if buffer is not None:
                found.append((f"{index} {kind}", buffer[:, :, :length]))
    states: dict[tuple[int, str], torch.Tensor] = getattr(cache, "states", {})
    return found + [(f"{index} {kind}", state) for (index, kind), state in states.items()]


def _slot(cache: AnyCache, part: RowPart, length: int) -> tuple[int, str]:
    """The layer and the kind of ``part``. Raises ValueError if a cache of ``length`` tokens has none like it."""
    index, _, kind = part.name.partition(" ")
    kinds: tuple[str, ...] = ("keys", "values")
    if not cache.can_truncate:
        kinds += ("linear", "convolution", "recurrent")
    known = index.isdecimal() and len(index) < 6 and int(index) < len(cache.layers) and kind in kinds
    shape: Any = part.shape
    if not known or part.numbers not in _DTYPES or not 2 <= len(shape) <= 4 or shape[0] != 1:
        raise ValueError(f"the model has no {part.name} of the shape {shape}")
    if kind in ("keys", "values") and (len(shape) != 4 or shape[2] != length):
        raise ValueError(f"{part.name} of the shape {shape} are not those of {length} tokens")
    return int(index), kind
