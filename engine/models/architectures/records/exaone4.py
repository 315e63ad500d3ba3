"""EXAONE 4, whose layers have norms only after their parts. In its larger models three of four layers see a window, and
only those rotate their heads."""

from __future__ import annotations

from typing import Any

from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import sliding_layers
from engine.models.architectures.layer_rules import check_kinds, kind_windows
from engine.models.architectures.record import SCALED_ROPE, Config, DecoderRecord, Family, GgufRecord, MlxRecord

_UNROTATED = "unrotated"


def _kind(config: Config, layer: int) -> str:
    """The kind of a layer where ``layer_types`` does not say it: by a pattern of letters, or all but every so-many-th
    see a window."""
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None or not pattern:
        return "full_attention"
    if isinstance(pattern, str):
        return "sliding_attention" if pattern[layer % len(pattern)] == "L" else "full_attention"
    every = whole_number(config, "sliding_window_pattern")
    return "sliding_attention" if (layer + 1) % every else "full_attention"


def _kinds(config: Config, layers: int) -> list[str]:
    named = config.get("layer_types") or [_kind(config, layer) for layer in range(layers)]
    return check_kinds(named, layers, ("sliding_attention", "full_attention"))


def _head_kinds(config: Config, layers: int) -> list[str]:
    if config.get("sliding_window") is None:
        return ["full_attention"] * layers
    return [_UNROTATED if kind == "full_attention" else kind for kind in _kinds(config, layers)]


def _settings(metadata: Metadata) -> dict[str, Any]:
    if not metadata.number("attention.sliding_window", 0):
        return {"sliding_window": None, "layer_types": ["full_attention"] * metadata.number("block_count")}
    return {
        "sliding_window": metadata.number("attention.sliding_window"),
        "layer_types": sliding_layers(metadata, 4),
    }


def _translate(config: Config) -> dict[str, Any]:
    kinds = _kinds(config, whole_number(config, "num_hidden_layers"))
    letters = "".join("L" if kind == "sliding_attention" else "G" for kind in kinds)
    return {"sliding_window_pattern": letters if config.get("sliding_window") else None}


FAMILIES = (
    Family(
        "exaone4",
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        decoder=DecoderRecord(
            norms="after",
            layer_kind=_kind,
            head_kinds=_head_kinds,
            unrotated=_UNROTATED,
            windows=kind_windows(_kinds),
            head_norm="per-head",
        ),
        gguf=GgufRecord("exaone4", "Exaone4ForCausalLM", settings=_settings),
        mlx=MlxRecord(
            "exaone4",
            rope_types=SCALED_ROPE,
            windowed=True,
            honours={"hidden_act": ("silu",)},
            translate=_translate,
        ),
    ),
)
