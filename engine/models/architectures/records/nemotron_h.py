"""Nemotron-H and Nemotron 3: each layer is a Mamba-2 layer, attention without positions, a network or experts alone.

Networks and experts have no gate: what they make of their only matrix is squared.
"""

from __future__ import annotations

from typing import Any

from engine.models.architectures import gguf_mamba
from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.layer_rules import UNROTATED
from engine.models.architectures.parts import GROUPED, LAYER
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    ExpertTensor,
    Family,
    GgufRecord,
    MambaSizes,
    MoeRecord,
    Stacking,
)

_EXPERTS = LAYER + "mixer.experts."
_NAMES = {
    "model.embed_tokens.": "model.embeddings.",
    "model.norm.": "model.norm_f.",
    ".input_layernorm.": ".norm.",
    ".self_attn.": ".mixer.",
    ".mamba.": ".mixer.",
    ".mlp.": ".mixer.",
}
"""Parts of the usual names of a checkpoint, and what they are in this family."""
_KINDS = {
    "M": "linear_attention",
    "mamba": "linear_attention",
    "*": "full_attention",
    "attention": "full_attention",
    "E": "moe",
    "-": "mlp",
}
"""Kinds of layers in older files, as letters or as words, and their names now."""
_OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}


def _renamed(config: Config) -> dict[str, Any]:
    named = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    older = {now: config[name] for name, now in _OLDER.items() if name in config}
    if not named:
        return older
    kinds = [_KINDS.get(kind, kind) for kind in named]
    return older | {"layer_types": kinds, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def _sizes(config: Config) -> MambaSizes:
    return MambaSizes(
        heads=whole_number(config, "mamba_num_heads"),
        width=whole_number(config, "mamba_head_dim"),
        groups=whole_number(config, "n_groups"),
        states=whole_number(config, "ssm_state_size"),
        taps=whole_number(config, "conv_kernel"),
        biased=config["use_conv_bias"],
    )


def _moe_layers(config: Config, layers: int) -> list[int]:
    return [layer for layer, kind in enumerate(config["layer_types"]) if kind == "moe"]


def _settings(metadata: Metadata) -> dict[str, Any]:
    layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    heads, widths = (metadata.each_layer(key)[:layers] for key in ("attention.head_count_kv", "feed_forward_length"))
    sizes, experts = gguf_mamba.sizes(metadata), metadata.number("expert_count", 0)
    network, pairs = "moe" if experts else "mlp", zip(heads, widths, strict=True)
    kinds = ["full_attention" if count else network if width else "linear_attention" for count, width in pairs]
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": max(1, *heads),
        "layer_types": kinds,
        "intermediate_size": max(1, *widths),
        "layer_norm_epsilon": metadata.short_real("attention.layer_norm_rms_epsilon", 1e-5),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.width,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.states,
        "conv_kernel": sizes.taps,
        "use_conv_bias": sizes.biased,
        **(_expert_settings(metadata) if experts else {}),
    }


def _expert_settings(metadata: Metadata) -> dict[str, Any]:
    width = metadata.number("expert_feed_forward_length")
    return {
        "n_routed_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "routed_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
        "n_group": metadata.number("expert_group_count", 1),
        "topk_group": metadata.number("expert_group_used_count", 1),
        "moe_latent_size": metadata.number("moe_latent_size") if metadata.has("moe_latent_size") else None,
    }


def _ungated(up: str, down: str, stacked: bool) -> tuple[ExpertTensor, ...]:
    stacking: Stacking = "stacked" if stacked else "separate"
    return (ExpertTensor(up, ("gate",), stacking), ExpertTensor(down, ("down",), stacking))


FAMILIES = (
    Family(
        "nemotron_h",
        defaults={
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
            "mamba_hidden_act": "silu",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        renamed=_renamed,
        stored_starts=(("backbone.", "model."),),
        decoder=DecoderRecord(
            mixer="mamba",
            mamba=_sizes,
            norms="single",
            head_kinds=lambda config, layers: [UNROTATED] * layers,
            unrotated=UNROTATED,
            mlp_bias="mlp_bias",
            epsilon_setting="layer_norm_epsilon",
            activation_setting="mlp_hidden_act",
            names=_NAMES,
        ),
        moe=MoeRecord(
            (
                _ungated(_EXPERTS + "{expert}.up_proj.weight", _EXPERTS + "{expert}.down_proj.weight", stacked=False),
                _ungated(_EXPERTS + "up_proj", _EXPERTS + "down_proj", stacked=True),
                _ungated(LAYER + "ffn_up_exps.weight", LAYER + "ffn_down_exps.weight", stacked=True),
            ),
            GROUPED,
            setting="n_routed_experts",
            shared="plain",
            shared_ffn=lambda config: whole_number(config, "moe_shared_expert_intermediate_size"),
            activation="squared",
            layers=_moe_layers,
            count_key="n_routed_experts",
            ffn_key="moe_intermediate_size",
            latent_key="moe_latent_size",
        ),
        unused=("mtp.",),
        gguf=GgufRecord(
            "nemotron_h_moe",
            "NemotronHForCausalLM",
            also=("nemotron_h",),
            settings=_settings,
            own_heads=True,
            mixer=gguf_mamba.tensors(_sizes),
            mixed_layers="linear_attention",
            changes=lambda config: gguf_mamba.changes(config, "mixer"),
        ),
    ),
)
