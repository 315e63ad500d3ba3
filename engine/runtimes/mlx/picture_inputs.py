"""What pictures change in a pass of an mlx-lm model: embeddings, positions of queries and keys, and what tokens see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.gemma3_text import Gemma3Model

from engine.pictures.places import Positions, axis_of_pairs
from engine.pictures.shown import PicturePass
from engine.pictures.sight import Sight
from engine.runtimes.mlx.cache import LayerCache, RowCache
from engine.runtimes.mlx.spans import TimedPart

Array = Any


class Turning:
    """How far the attention of a model turns queries and keys in the pass that is being built."""

    def __init__(self) -> None:
        self.shift = 0
        """What is added to the number of a token in its row to get its position."""
        self.spread: Positions | None = None
        """Positions [3, tokens] of the tokens of the only row; None: ``shift`` says it."""


class SpreadRope(nn.Module):  # type: ignore[misc]
    """Replaces mlx-lm's ``rope`` of an attention, which knows positions in the text only."""

    def __init__(self, rope: Any, turning: Turning, sections: tuple[int, int, int]) -> None:
        super().__init__()
        self.rope = rope
        self._turning = turning
        self._sections = sections

    def __call__(self, numbers: Array, offset: int = 0) -> Array:
        """``numbers`` [rows, heads, tokens, size], turned."""
        spread = self._turning.spread
        if spread is None:
            return self.rope(numbers, offset=offset + self._turning.shift)
        # Each token becomes a row, because rows may have positions of their own.
        apart = numbers.transpose(2, 1, 0, 3)
        time, above, left = (self.rope(apart, offset=mx.array(axis.astype(np.int32))) for axis in spread)
        pairs = axis_of_pairs(self._sections, self.rope.dims // 2)
        axes = mx.array(np.concatenate((pairs, pairs, np.zeros(numbers.shape[-1] - 2 * len(pairs), np.int64))))
        return mx.where(axes == 1, above, mx.where(axes == 2, left, time)).transpose(2, 1, 0, 3)


def spread_ropes(layers: Sequence[Any], sections: tuple[int, int, int]) -> Turning:
    """Let each attention in ``layers`` turn as the result says."""
    turning = Turning()
    for layer in layers:
        attention = getattr(layer, "self_attn", None)
        if attention is not None:
            attention = attention["inner"] if isinstance(attention, TimedPart) else attention
            attention.rope = SpreadRope(attention.rope, turning, sections)
    return turning


class _Deeper:
    """A layer that adds to what it gives."""

    def __init__(self, layer: Any, rows: Array) -> None:
        self._layer = layer
        self._rows = rows

    def __call__(self, *inputs: Any, **settings: Any) -> Array:
        return self._layer(*inputs, **settings) + self._rows


@contextmanager
def _scaling_nothing(backbone: Any) -> Iterator[Array | None]:
    """The factor of embeddings in ``backbone`` (None: there is none), which scales nothing meanwhile.

    Gemma's definitions scale what they are given, and the tower's rows are not to be scaled.
    """
    scale = getattr(backbone, "embed_scale", None)
    if scale is not None:
        backbone.embed_scale = 1.0
        try:
            yield mx.array(scale)
        finally:
            backbone.embed_scale = scale
    elif isinstance(backbone, Gemma3Model):
        args = backbone.args
        backbone.args = replace(args, hidden_size=1)  # of which it takes the root
        try:
            yield mx.array(args.hidden_size**0.5, mx.bfloat16)
        finally:
            backbone.args = args
    else:
        yield None


@contextmanager
def embedded(backbone: Any, pictures: PicturePass, sight: Sight) -> Iterator[tuple[Array, Array]]:
    """Ids and embeddings of the tokens of ``pictures`` [1, tokens] for ``backbone``, while it takes embeddings as they
    are."""
    places = np.array([pictures.ids]) < 0
    ids = mx.array(np.where(places, sight.given, pictures.ids).astype(np.int32))
    embeddings = backbone.embed_tokens(ids)
    given = np.zeros((*places.shape, pictures.given.shape[1]), np.float32)
    given[places] = pictures.given
    parts = mx.split(mx.array(given).astype(embeddings.dtype), 1 + sight.deep, axis=-1)
    layers = list(backbone.layers)
    backbone.layers = [*map(_Deeper, layers, parts[1:]), *layers[sight.deep :]]
    try:
        with _scaling_nothing(backbone) as scale:
            scaled = embeddings if scale is None else embeddings * scale.astype(embeddings.dtype)
            yield ids, mx.where(mx.array(places)[..., None], parts[0], scaled)
    finally:
        backbone.layers = layers


@contextmanager
def seeing_ahead(caches: Sequence[LayerCache], ends: Positions | None, *, in_full: bool) -> Iterator[None]:
    """Lets the tokens of a pass see up to their ``ends`` in layers with a window, and ``in_full`` in all; None: up to
    themselves."""
    further = [cache for cache in caches if isinstance(cache, RowCache) and (in_full or cache.window is not None)]
    for cache in further:
        cache.ends = None if ends is None else mx.array(ends)
    try:
        yield
    finally:
        for cache in further:
            cache.ends = None
