"""Granite 4 with Mamba-2 layers, without and with experts; some of its dense models have attention in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.architectures import gguf_mamba
from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import paired_changes
from engine.models.architectures.record import (
    Config,
    Family,
    GgufRecord,
    MambaSizes,
    MlxRecord,
    MoeRecord,
)
from engine.models.architectures.records.granite import (
    DECODER,
    DEFAULTS,
    LAYOUTS,
    ROUTER,
    SHARED_NAMES,
    scales,
    shared_ffn,
)

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers in older files and in mlx-lm, and their names now."""


def _sizes(config: Config) -> MambaSizes:
    heads, width = whole_number(config, "mamba_n_heads"), config.get("mamba_d_head")
    if width in (None, "auto"):
        width = whole_number(config, "mamba_expand") * whole_number(config, "hidden_size") // heads
    groups, states, taps = (whole_number(config, f"mamba_{name}") for name in ("n_groups", "d_state", "d_conv"))
    width = whole_number({"mamba_d_head": width}, "mamba_d_head")
    return MambaSizes(heads, width, groups, states, taps, biased=config["mamba_conv_bias"])


def _head_kinds(config: Config, layers: int) -> list[str]:
    return ["rotated" if config.get("position_embedding_type") == "rope" else "unrotated"] * layers


def _settings(metadata: Metadata) -> dict[str, Any]:
    sizes, heads = gguf_mamba.sizes(metadata), metadata.each_layer("attention.head_count_kv")
    width = metadata.number("feed_forward_length")
    return scales(metadata) | {
        "num_key_value_heads": max(1, *heads),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "num_local_experts": metadata.number("expert_count", 0),
        "num_experts_per_tok": metadata.number("expert_used_count", 0) or 2,
        "shared_intermediate_size": metadata.number("expert_shared_feed_forward_length", width),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned", False) else "nope",
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.width,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.states,
        "mamba_d_conv": sizes.taps,
        "mamba_expand": max(1, sizes.values // metadata.number("embedding_length")),
        "mamba_conv_bias": sizes.biased,
    }


def _for_mlx(config: Config) -> Config:
    kinds = {now: older for older, now in _KINDS.items()}
    return {
        "layer_types": [kinds.get(kind, kind) for kind in config["layer_types"]],
        "position_embedding_type": "rope" if config.get("position_embedding_type") == "rope" else "nope",
        "mamba_d_head": _sizes(config).width,
        **({} if config["num_local_experts"] else {"intermediate_size": config["shared_intermediate_size"]}),
    }


FAMILIES = (
    Family(
        "granitemoehybrid",
        defaults=DEFAULTS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
        },
        renamed=lambda config: (
            {"layer_types": [_KINDS.get(kind, kind) for kind in config["layer_types"]]}
            if config.get("layer_types")
            else {}
        ),
        decoder=replace(
            DECODER,
            mixer="mamba",
            mamba=_sizes,
            layer_kind=lambda config, layer: "linear_attention",
            head_kinds=_head_kinds,
            unrotated="unrotated",
            ffn=lambda config, layer: whole_number(config, "shared_intermediate_size"),
            merged_ffn=True,
            names=SHARED_NAMES,
        ),
        moe=MoeRecord(
            LAYOUTS,
            ROUTER,
            setting="num_local_experts",
            shared="plain",
            shared_ffn=shared_ffn,
        ),
        gguf=GgufRecord(
            "granitehybrid",
            "GraniteMoeHybridForCausalLM",
            settings=_settings,
            paired_rotary=True,
            mixer=gguf_mamba.tensors(_sizes),
            mixed_layers="linear_attention",
            changes=lambda config: paired_changes(config) | gguf_mamba.changes(config),
        ),
        mlx=MlxRecord(
            "granitemoehybrid",
            block="block_sparse_moe",
            route="own-router",
            honours={"hidden_act": ("silu",), "mamba_n_groups": (1,)},
            translate=_for_mlx,
            stored_names=(
                (".mlp.gate_proj.", ".shared_mlp.input_linear.gate."),
                (".mlp.up_proj.", ".shared_mlp.input_linear.up."),
                (".mlp.down_proj.", ".shared_mlp.output_linear."),
            ),
            renames=True,
        ),
        tokenizer_class="TokenizersBackend",
    ),
)
