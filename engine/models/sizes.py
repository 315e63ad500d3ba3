"""The sizes of a model, from its files' headers and its ``config.json``, without reading weights or using torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.errors import ModelError
from engine.models.families import (
    check_supported,
    expert_shape,
    language_config,
    layer_count,
    stated_experts_per_token,
)
from engine.models.files import ModelFiles, whole_bytes, whole_weights
from engine.models.number_formats import is_packed
from engine.models.weight_layout import WeightLayout
from engine.models.wording import shown
from engine.planning.prediction import ModelSizes

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SHARED = frozenset(("shared_expert", "shared_experts", "shared_expert_gate"))
"""Parts of the names of shared experts, which a ring computes during the exchange."""
_FEW = 2
"""Default experts per token if ``config.json`` gives none, as in the commonest family."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that loading and running a model need. Bytes are for computing in ``dtype``; experts stay as stored."""

    family: str
    dtype: str
    """``bfloat16`` or ``float32``: the requested one, else that of most of the stored model."""
    stored: str
    """Dtype or packed format of most of the stored model."""
    layers: int
    moe_layers: int
    experts: int
    experts_per_token: int
    hidden: int
    ffn: int
    """Inner size of a routed expert, or of the dense layers."""
    vocabulary: int
    context_limit: int
    trunk_bytes: int
    embedding_bytes: int
    """Bytes of the embedding, of which a token reads only one row; 0 if the embedding is also the head."""
    expert_bytes: int
    key_value_bytes_per_token: int
    shared_bytes: int = 0
    """Bytes of the shared experts, which are part of the trunk and are run for every token."""
    expert_weights: int = 0
    """Number of weights of the routed experts, whatever bytes they take; 0: as many as of the computed width."""

    @property
    def width(self) -> int:
        """Bytes of one number in ``dtype``."""
        return _WIDTHS.get(self.dtype, 2)

    def for_planning(self, name: str = "", bytes_per_weight: int | None = None) -> ModelSizes:
        """The planner's sizes. ``bytes_per_weight`` is for a runtime that computes with another width."""
        return ModelSizes(
            name=name,
            layers=self.layers,
            moe_layers=self.moe_layers,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            hidden=self.hidden,
            trunk_bytes=self.trunk_bytes,
            expert_bytes=self.expert_bytes,
            key_value_bytes_per_token=self.key_value_bytes_per_token,
            bytes_per_weight=self.width if bytes_per_weight is None else bytes_per_weight,
            shared_bytes=self.shared_bytes,
            expert_weights=self.expert_weights,
        )


@dataclass(frozen=True)
class _Trunk:
    """Its commonest dtype and its bytes; of those, an embedding that is not the head, and shared experts."""

    stored: str
    nbytes: int
    embedding: int
    shared: int


class _Stored(Protocol):
    """Of a tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class _Routed:
    """The routed experts: layers that have them, experts per layer, bytes of all, the format of most, and the number of
    their weights, 0 if that is unknown."""

    layers: int
    count: int
    nbytes: int
    dtype: str
    weights: int = 0


def sizes_of(files: ModelFiles, dtype: str = "auto") -> Sizes:
    """Raises ModelError if ``config.json`` does not give a size, naming it."""
    experts = files.experts
    routed = None
    if experts is not None:
        layers = len(experts.layers)
        routed = _Routed(layers, experts.count, whole_bytes(experts), experts.dtype, whole_weights(experts))
    return _sizes(files.config, _trunk(files.trunk(), files.config), routed, dtype)


def sizes_in_library(layout: WeightLayout, dtype: str = "auto") -> Sizes:
    """The sizes of a folder that mlx-lm wrote. Quantised weights stay as stored.

    Raises ModelError.
    """
    entries = [(name, entry) for piece in layout.trunk for name, _, entry in piece]
    trunk = _trunk(entries, layout.config)
    # Norms are never quantised: the library computes in their dtype.
    norm = next((entry.dtype for name, entry in entries if name.endswith("norm.weight")), "BF16")
    nbytes = layout.expert_bytes * len(layout.experts)
    routed = _Routed(len(layout.layers), layout.count, nbytes, norm) if layout.experts else None
    if trunk.stored not in _WIDTHS:
        dtype = _NAMES.get(norm, norm)
        return _sizes(layout.config, replace(trunk, stored=dtype), routed, dtype)
    return _sizes(layout.config, trunk, routed, dtype)


def _sizes(whole: Mapping[str, Any], trunk: _Trunk, experts: _Routed | None, dtype: str) -> Sizes:
    family = check_supported(whole)
    config = language_config(whole, family)
    stored = trunk.stored
    if experts is not None and experts.dtype in _NAMES:
        stored = _NAMES[experts.dtype]
    chosen = dtype
    if dtype == "auto":
        chosen = "bfloat16" if is_packed(stored) else stored
    shape = expert_shape(whole, family)
    # torch converts a plain trunk; packed weights and experts are read as they are.
    scale = 1.0 if is_packed(trunk.stored) else _WIDTHS.get(chosen, 2) / _WIDTHS.get(trunk.stored, 2)
    hidden = _number(config, "hidden_size", "d_model")
    return Sizes(
        family=family.model_type,
        dtype=chosen,
        stored=stored,
        layers=layer_count(whole, family),
        moe_layers=0 if experts is None else experts.layers,
        experts=0 if experts is None else experts.count,
        experts_per_token=0 if experts is None else experts_per_token(config),
        hidden=hidden,
        ffn=shape.ffn if shape is not None else _number(config, "intermediate_size", default=4 * hidden),
        vocabulary=_number(config, "vocab_size"),
        context_limit=_number(config, "max_position_embeddings", "max_seq_len", default=4096),
        trunk_bytes=round(trunk.nbytes * scale),
        embedding_bytes=round(trunk.embedding * scale),
        shared_bytes=round(trunk.shared * scale),
        expert_bytes=0 if experts is None else experts.nbytes,
        expert_weights=_expert_weights(experts, hidden, 0 if shape is None else shape.ffn),
        key_value_bytes_per_token=key_value_numbers(config) * _WIDTHS.get(chosen, 2),
    )


def _expert_weights(experts: _Routed | None, hidden: int, ffn: int) -> int:
    if experts is None:
        return 0
    return experts.weights or 3 * hidden * ffn * experts.count * experts.layers


def experts_per_token(config: Mapping[str, Any]) -> int:
    """The number of experts per token, from whichever setting the family uses."""
    return stated_experts_per_token(config) or _FEW


def key_value_numbers(config: Mapping[str, Any]) -> int:
    """Numbers that one token adds to the cache: keys and values of every layer that keeps them.

    Latent attention (deepseek) caches the latents and the rotated part; recurrent layers keep a state of fixed size.
    """
    layers = _number(config, "num_hidden_layers", "n_layers")
    if config.get("kv_lora_rank"):
        per_layer = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
    else:
        heads = _number(config, "num_attention_heads", "n_heads")
        inner = config.get("attn_config")
        grouped = config.get("num_key_value_heads") or (inner.get("kv_n_heads") if isinstance(inner, Mapping) else None)
        width = config.get("head_dim") or _number(config, "hidden_size", "d_model") // heads
        per_layer = 2 * int(grouped or heads) * int(width)
    kinds = config.get("layer_types")
    kept = sum(kind != "linear_attention" for kind in kinds) if isinstance(kinds, list) else layers
    return per_layer * kept


def _trunk(tensors: Iterable[tuple[str, _Stored]], config: Mapping[str, Any]) -> _Trunk:
    by_dtype: dict[str, int] = {}
    embedding = shared = 0
    has_head = False
    for name, tensor in tensors:
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
        has_head = has_head or name.endswith("lm_head.weight")
        if name.rpartition(".")[0].endswith(("embed_tokens", "wte")):
            embedding += tensor.nbytes
        elif not _SHARED.isdisjoint(name.split(".")):
            shared += tensor.nbytes
    dtype = max(by_dtype, key=lambda stored: by_dtype[stored], default="BF16")
    tied = bool(config.get("tie_word_embeddings", False))
    total = sum(by_dtype.values())
    if tied and has_head:  # stored twice, kept once
        return _Trunk(_NAMES.get(dtype, dtype), total - embedding, 0, shared)
    return _Trunk(_NAMES.get(dtype, dtype), total, embedding if has_head else 0, shared)


def _number(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of ``keys`` that ``config`` has. Raises ModelError if there is none and no ``default``."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ModelError(f"config.json gives {shown(value)} for {key}, which must be a number above 0.")
    if default is None:
        raise ModelError(f"config.json does not say {keys[0]}; fetch the model again.")
    return default
