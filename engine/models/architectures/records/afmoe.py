"""AFMoE (Trinity): norms before and after the parts of a layer, gates of what heads have gathered, and windows in three
of four layers, which alone rotate their heads."""

from __future__ import annotations

from typing import Any

from engine.models.architectures.config_values import number_of, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import experts, sliding_layers
from engine.models.architectures.layer_rules import UNROTATED, after_dense, full_every, kind_windows, kinds_by
from engine.models.architectures.parts import MLP_EXPERTS, QWEN, of_mlx, shared_experts
from engine.models.architectures.record import (
    SCALED_ROPE,
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    HeadGate,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)

_KIND = full_every("global_attn_every_n_layers", 4)
_KINDS = kinds_by(_KIND)
_NAMES = {"pre_feedforward_layernorm": "pre_mlp_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm"}
"""Parts of the usual names of a checkpoint, and what they are in this family."""


def _head_kinds(config: Config, layers: int) -> list[str]:
    return [kind if kind == "sliding_attention" else UNROTATED for kind in _KINDS(config, layers)]


def _settings(metadata: Metadata) -> dict[str, Any]:
    return {
        **experts("num_experts")(metadata),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "num_shared_experts": metadata.number("expert_shared_count", 0),
        "num_dense_layers": metadata.number("leading_dense_block_count", 0),
        "route_scale": metadata.short_real("expert_weights_scale", 1.0),
        "sliding_window": metadata.number("attention.sliding_window"),
        "layer_types": sliding_layers(metadata, 4),
        "mup_enabled": True,  # llama.cpp always scales embeddings
    }


def _no_full_layer(config: Config) -> str | None:
    """mlx-lm looks for a layer that sees everything."""
    kinds = config.get("layer_types")
    return f"layer_types {kinds!r}" if isinstance(kinds, list) and "full_attention" not in kinds else None


FAMILIES = (
    Family(
        "afmoe",
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "num_dense_layers": 1,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "global_attn_every_n_layers": 4,
            "sliding_window": 1024,
            "mup_enabled": False,
        },
        decoder=DecoderRecord(
            norms="around",
            layer_kind=_KIND,
            head_kinds=_head_kinds,
            unrotated=UNROTATED,
            windows=kind_windows(_KINDS),
            head_norm="per-head",
            head_gate=HeadGate("gate_proj"),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            embedding_scale=lambda config: whole_number(config, "hidden_size") ** (0.5 * bool(config["mup_enabled"])),
            names=_NAMES,
        ),
        moe=MoeRecord(
            (*QWEN, of_mlx(MLP_EXPERTS)),
            RouterRecord(
                ("mlp.router.gate.weight",),
                scoring="sigmoid",
                normalise=True,
                added_to_sum=1e-20,
                correction="mlp.expert_bias",
                scale=number_of("route_scale"),
            ),
            shared="plain",
            shared_ffn=shared_experts("num_shared_experts"),
            layers=after_dense("num_dense_layers"),
            count_key="num_experts",
            ffn_key="moe_intermediate_size",
        ),
        gguf=GgufRecord("afmoe", "AfmoeForCausalLM", settings=_settings),
        mlx=MlxRecord(
            "afmoe",
            experts="experts",
            route="best-of-biased-sigmoids",
            rope_types=SCALED_ROPE,
            windowed=True,
            honours={
                "hidden_act": ("silu",),
                "attention_bias": (False,),
                "n_group": (1,),
                "route_norm": (True,),
                "score_func": ("sigmoid",),
            },
            checks=(_no_full_layer,),
            translate=lambda config: {"layer_types": _KINDS(config, whole_number(config, "num_hidden_layers"))},
        ),
    ),
)
