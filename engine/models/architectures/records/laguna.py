"""Laguna: heads have gates, and layers with a window have other rotations and more heads than those without."""

from __future__ import annotations

from typing import Any

from engine.errors import damaged, shown
from engine.models.architectures.config_values import number_of, whole_number
from engine.models.architectures.layer_rules import KINDS, check_kinds, kind_windows, rope_by_kind, sparse_layers
from engine.models.architectures.parts import QWEN
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    Family,
    HeadGate,
    MoeRecord,
    RouterRecord,
)

_rope_by_type = rope_by_kind(
    {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
)


def _kinds(config: Config, layers: int) -> list[str]:
    named = config.get("layer_types")
    return ["full_attention"] * layers if named is None else check_kinds(named, layers, KINDS)


def _head_kinds(config: Config, layers: int) -> list[str]:
    """What each layer sees and how many heads it has, as a kind. Raises ModelError if
    ``num_attention_heads_per_layer`` does not name a number for each layer."""
    counts = config.get("num_attention_heads_per_layer")
    if counts is None:
        counts = [whole_number(config, "num_attention_heads")] * layers
    if not isinstance(counts, list) or len(counts) != layers or not all(type(one) is int and one > 0 for one in counts):
        raise damaged(
            f"config.json gives {shown(counts)} for num_attention_heads_per_layer, which must be a number for each of "
            f"{layers} layers"
        )
    return [f"{kind} {count}" for kind, count in zip(_kinds(config, layers), counts, strict=True)]


def _rope(config: Config, kind: str) -> dict[str, Any]:
    return _rope_by_type(config, kind.partition(" ")[0])


def _heads_of_kind(config: Config, kind: str) -> Config:
    count = kind.partition(" ")[2]
    return {"num_attention_heads": int(count)} if count else {}


FAMILIES = (
    Family(
        "laguna",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            "moe_router_logit_softcapping": 0.0,
            "sliding_window": 512,
            "gating": True,
        },
        decoder=DecoderRecord(
            layer_kind=lambda config, layer: "full_attention",
            head_kinds=_head_kinds,
            kind_rope=_rope,
            kind_settings=_heads_of_kind,
            windows=kind_windows(_kinds),
            head_norm="per-head",
            head_gate=HeadGate("g_proj", softplus=True, whole=lambda config: config["gating"] in (True, "per-head")),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            rotated=1.0,
            names={"mlp.shared_experts.": "mlp.shared_expert."},
        ),
        moe=MoeRecord(
            QWEN,
            RouterRecord(
                ("mlp.gate.weight",),
                scoring="sigmoid",
                normalise=True,
                correction="mlp.experts.e_score_correction_bias",
                scale=number_of("moe_routed_scaling_factor"),
            ),
            shared="plain",
            shared_ffn=lambda config: whole_number(config, "shared_expert_intermediate_size"),
            layers=sparse_layers(lambda config: 1),
            count_key="num_experts",
            ffn_key="moe_intermediate_size",
        ),
    ),
)
