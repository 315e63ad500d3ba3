"""Kimi-Linear: three of four layers are delta-nets whose keys decay each by itself, the others attend over latents that
are not rotated."""

from __future__ import annotations

from typing import Any

from engine.errors import damaged
from engine.models.architectures import gguf_kda
from engine.models.architectures.config_values import setting, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.layer_rules import UNROTATED, layer_list, sparse_layers
from engine.models.architectures.parts import GROUPED, LATENTS, LAYER, MIXTRAL, of_mlx
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    DeltaSizes,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
)

NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Settings of files, and transformers' usual names of them."""
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Settings in the section ``linear_attn_config`` of published files, and transformers' names of them."""


def usual(config: Config) -> dict[str, Any]:
    """The settings of :data:`NAMES` by their usual names."""
    return {now: config[name] for name, now in NAMES.items() if name in config}


def _renamed(config: Config) -> dict[str, Any]:
    section = "linear_attn_config."
    sizes = {now: setting(config, section + name) for name, now in _SIZES.items()}
    renamed = usual(config) | {name: size for name, size in sizes.items() if size is not None}
    full, linear = layer_list(config, section + "full_attn_layers"), layer_list(config, section + "kda_layers")
    if config.get("layer_types") is not None or full is None or linear is None:
        return renamed
    layers = range(1, len(full) + len(linear) + 1)
    if sorted(full + linear) != list(layers):
        raise damaged(
            "config.json gives full_attn_layers and kda_layers that do not name every layer, from 1 on, exactly once"
        )
    return renamed | {"layer_types": ["full_attention" if layer in full else "linear_attention" for layer in layers]}


def _sizes(config: Config) -> DeltaSizes:
    heads, width = whole_number(config, "linear_num_heads"), whole_number(config, "linear_head_dim")
    taps = whole_number(config, "linear_conv_kernel_dim")
    return DeltaSizes(heads, heads, width, width, taps, wide_decays=True, sigmoid_gates=True, rank=width)


def _kind(config: Config, layer: int) -> str:
    return "full_attention" if layer and layer % 4 == 0 else "linear_attention"


def _settings(metadata: Metadata) -> dict[str, Any]:
    found = gguf_kda.settings(metadata)
    heads = metadata.number("attention.head_count")
    return found | {"linear_head_dim": metadata.number("kda.head_dim"), "linear_num_heads": heads}


def _translate(config: Config) -> Config:
    kinds = enumerate(config["layer_types"], 1)
    dense = [kind == "dense" for kind in config["mlp_layer_types"]]
    return {
        "linear_attn_config": {
            **{name: config[now] for name, now in _SIZES.items()},
            "kda_layers": [layer for layer, kind in kinds if kind == "linear_attention"],
        },
        **{name: config[now] for name, now in NAMES.items()},
        "first_k_dense_replace": sum(dense),
        "rope_theta": 10_000.0,
    }


def _dense_layers_first(config: Config) -> str | None:
    kinds = config.get("mlp_layer_types")
    regular = kinds is None or sorted(kinds) == list(kinds)  # "dense" comes before "sparse"
    return None if regular else f"mlp_layer_types {kinds!r}"


FAMILIES = (
    Family(
        "kimi_linear",
        defaults={
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
        },
        renamed=_renamed,
        stored_names=((".block_sparse_moe.", ".mlp."),),
        decoder=DecoderRecord(
            mixer="delta-net",
            delta=_sizes,
            layer_kind=_kind,
            latents=True,
            head_kinds=lambda config, layers: [UNROTATED] * layers,
            unrotated=UNROTATED,
        ),
        moe=MoeRecord(
            (*MIXTRAL, of_mlx(LAYER + "mlp.switch_mlp")),
            GROUPED,
            shared="plain",
            layers=sparse_layers(lambda config: whole_number(config, "first_k_dense_replace", default=1, minimum=0)),
            count_key="num_experts",
            ffn_key="moe_intermediate_size",
        ),
        gguf=GgufRecord(
            "kimi-linear",
            "KimiLinearForCausalLM",
            settings=_settings,
            own_heads=True,
            mixer=gguf_kda.tensors(_sizes, wide_logarithms=True),
            mixed_layers="linear_attention",
            changes=gguf_kda.changes,
        ),
        mlx=MlxRecord(
            "kimi_linear",
            route="best-of-groups",
            honours={"hidden_act": ("silu",), "q_lora_rank": (None,), "attention_bias": (False,)},
            checks=(_dense_layers_first,),
            translate=_translate,
            stored_names=(
                *LATENTS,
                (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
                *((f".{part}_conv.conv.", f".{part}_conv1d.") for part in "qkv"),
            ),
        ),
        tokenizer_class="TokenizersBackend",
    ),
)
