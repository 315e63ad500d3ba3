"""EXAONE 4, whose layers have norms only after their parts, and K-EXAONE, with experts. In their larger models three of
four layers see a window, and only those rotate their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import grouped_experts, sliding_layers
from engine.models.architectures.layer_rules import check_kinds, kind_windows, sparse_layers
from engine.models.architectures.parts import GROUPED, QWEN, shared_experts
from engine.models.architectures.record import (
    SCALED_ROPE,
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
)

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


_moe_layers = sparse_layers(lambda config: whole_number(config, "first_k_dense_replace", minimum=0))


def _moe_settings(metadata: Metadata) -> dict[str, Any]:
    routed = grouped_experts(metadata, normalised=True)
    return {
        "num_experts": routed.pop("n_routed_experts"),
        "num_shared_experts": routed.pop("n_shared_experts"),
        **routed,
        **_settings(metadata),
        "num_hidden_layers": metadata.number("block_count") - metadata.number("nextn_predict_layers", 0),
    }


def _moe_translate(config: Config) -> dict[str, Any]:
    layers = whole_number(config, "num_hidden_layers")
    with_experts = _moe_layers(config, layers)
    return {
        "layer_types": _kinds(config, layers),
        "is_moe_layer": [layer in with_experts for layer in range(layers)],
        "num_experts": whole_number(config, "num_experts"),
    }


EXAONE4 = Family(
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
)
MOE = Family(
    "exaone_moe",
    defaults={
        **EXAONE4.defaults,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    decoder=replace(EXAONE4.decoder, norms="before"),
    moe=MoeRecord(
        QWEN,
        replace(GROUPED, correction="mlp.e_score_correction_bias"),
        shared="plain",
        shared_ffn=shared_experts("num_shared_experts"),
        layers=_moe_layers,
        count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    unused=("mtp.",),
    gguf=GgufRecord("exaone-moe", "ExaoneMoeForCausalLM", settings=_moe_settings),
    # Of several groups of experts mlx-lm gives those left out the score 0, which may be higher than a chosen one's.
    mlx=MlxRecord(
        "exaone_moe",
        route="own-gate",
        rope_types=SCALED_ROPE,
        nested_rotary=True,
        windowed=True,
        honours={"hidden_act": ("silu",), "n_group": (1,)},
        translate=_moe_translate,
        stored_names=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
    ),
)
FAMILIES = (EXAONE4, MOE)
