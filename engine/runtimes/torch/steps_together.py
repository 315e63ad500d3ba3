"""Steps of several texts in one pass: attention runs for each text by itself, all else over the rows of all of them.

Nothing is padded: a layer's cache gives attention the keys and values of each text as they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.models.architectures.families import FAMILIES
from engine.runtimes.torch.cache import AnyCache, GrowingLayer, KeyValueCache, Position

ATTENTION = "privatellm_together"
"""Name of this attention among those of transformers. Without a mask of that name, transformers makes none."""
SEEN_ALIKE = {"full_attention", "sliding_attention"}
"""Kinds of layers in which a new token sees all that the cache shows it, so that a step needs no mask."""


class _OfTexts(list[torch.Tensor]):
    """Keys or values [rows, heads, tokens, width] of each text, for attention by ``implementation``."""

    def __init__(self, tensors: Sequence[torch.Tensor], implementation: str) -> None:
        super().__init__(tensors)
        self.implementation = implementation


class _LayerOfTexts(GrowingLayer):
    """A layer of several texts, as long as the longest."""

    def __init__(self, layers: Sequence[GrowingLayer], rows: Sequence[int], implementation: str) -> None:
        super().__init__(Position(max(layer.position.length for layer in layers)))
        self._layers = layers
        self._rows = list(rows)
        self._implementation = implementation

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[_OfTexts, _OfTexts]:
        parts = zip(key_states.split(self._rows), value_states.split(self._rows), strict=True)
        found = [layer.update(*part) for layer, part in zip(self._layers, parts, strict=True)]
        keys, values = zip(*found, strict=True)
        return _OfTexts(keys, self._implementation), _OfTexts(values, self._implementation)


def can_step_together(config: Any, cache: AnyCache) -> bool:
    """Whether texts of a model of ``config``, whose rows have such a ``cache``, can be stepped in one pass.

    Latents cannot: transformers makes keys and values of what the cache shows. Neither can rotations that change with
    the length of the text: transformers takes those of the longest text for all.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    each = (rope, *(kind for kind in rope.values() if isinstance(kind, Mapping)))
    if getattr(config, "kv_lora_rank", None) or any(one.get("rope_type") == "longrope" for one in each):
        return False
    kinds = set(getattr(config, "layer_types", None) or ())
    plain = isinstance(cache, KeyValueCache) and all(type(layer) is GrowingLayer for layer in cache.layers)
    return plain and config.model_type in FAMILIES and kinds <= SEEN_ALIKE


@contextmanager
def attention_of_texts(config: Any, caches: Sequence[KeyValueCache], rows: Sequence[int]) -> Iterator[Cache]:
    """The cache of one step of ``caches`` with so many ``rows`` each, within which models of ``config`` attend to each
    text by itself."""
    usual = config._attn_implementation
    layers = [_LayerOfTexts(layers, rows, usual) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    config._attn_implementation = ATTENTION
    try:
        yield Cache(layers=layers)
    finally:
        config._attn_implementation = usual


def _attend(
    module: Any, query: torch.Tensor, key: _OfTexts, value: _OfTexts, attention_mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of ``query`` [rows, heads, 1, width]; returns [rows, 1, heads, width]."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(key.implementation, eager)
    queries = query.split([keys.shape[0] for keys in key])
    found = [attend(module, *part, None, **options)[0] for part in zip(queries, key, value, strict=True)]
    return torch.cat(found), None


AttentionInterface.register(ATTENTION, _attend)
