"""Granite with sliding windows, without and with experts: heads have sinks, and layers bases of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import damaged, shown
from engine.models.architectures.config_values import positive
from engine.models.architectures.layer_rules import KINDS, check_kinds, kind_windows
from engine.models.architectures.record import Config, Family
from engine.models.architectures.records.granite import GRANITE, GRANITE_MOE_SHARED

_UNROTATED = "0"


def _kind(config: Config, layer: int) -> str:
    """Every fourth layer from the first one on sees everything."""
    return "sliding_attention" if layer % 4 else "full_attention"


def _kinds(config: Config, layers: int) -> list[str]:
    named = config.get("layer_types")
    return check_kinds([_kind(config, i) for i in range(layers)] if named is None else named, layers, KINDS)


def _base(config: Config) -> Any:
    return (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10_000.0


def _head_kinds(config: Config, layers: int) -> list[str]:
    """The base of the rotations of each layer and whether it sees a window, as a kind. Raises ModelError if
    ``layer_rope_theta`` does not name a base for each layer."""
    bases = config.get("layer_rope_theta")
    if bases is None:
        bases = [_base(config)] * layers
    if not isinstance(bases, list) or len(bases) != layers or any(one != 0 and positive(one) for one in bases):
        raise damaged(
            f"config.json gives {shown(bases)} for layer_rope_theta, which must be a number for each of {layers} layers"
        )
    slides = [" slides" * (kind == "sliding_attention") for kind in _kinds(config, layers)]
    return [f"{base!r}{slide}" if base else _UNROTATED for base, slide in zip(bases, slides, strict=True)]


def _rope(config: Config, kind: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {**rope, "rope_theta": float(kind.partition(" ")[0])}


def _swa(family: Family, model_type: str, **defaults: Any) -> Family:
    decoder = replace(
        family.decoder,
        layer_kind=_kind,
        head_kinds=_head_kinds,
        unrotated=_UNROTATED,
        kind_rope=_rope,
        windows=kind_windows(_kinds),
        sinks=lambda config, kind: True,
    )
    all_defaults = {**family.defaults, "sliding_window": 128, **defaults}
    return replace(
        family,
        model_type=model_type,
        decoder=decoder,
        defaults=all_defaults,
        gguf=None,
        mlx=None,
        tokenizer_class="",
    )


FAMILIES = (
    _swa(GRANITE, "granite_swa", num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True),
    _swa(GRANITE_MOE_SHARED, "granitemoe_swa"),
)
