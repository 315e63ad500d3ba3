"""Ling 3: five of six layers are delta-nets whose keys decay each by itself, the others attend over latents, with a
gate for each head. The Flash model limits what SiLU gives in its last layers."""

from __future__ import annotations

import math
from typing import Any

from engine.errors import ModelError, damaged, shown
from engine.models.architectures import gguf_kda
from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import limits
from engine.models.architectures.layer_rules import listed_limits, sparse_layers
from engine.models.architectures.parts import GROUPED, QWEN
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    DeltaSizes,
    Family,
    GgufRecord,
    HeadGate,
    MoeRecord,
)
from engine.models.architectures.records.kimi_linear import usual


def _renamed(config: Config) -> dict[str, Any]:
    """Raises ModelError for another family under this name."""
    if config.get("linear_attention", "kda") != "kda" or config.get("group_norm_size") is not None:
        raise ModelError("Ling 2.5 has another kind of layers under the name of Ling 3, and does not run; use Ling 3.")
    return usual(config)


def _sizes(config: Config) -> DeltaSizes:
    heads = whole_number(config, "linear_num_heads", "num_attention_heads")
    width = whole_number(config, "linear_head_dim", "head_dim")
    taps = whole_number(config, "linear_conv_kernel_dim", "short_conv_kernel_size")
    least = float(config["kda_lower_bound"]) if config["kda_safe_gate"] else 0.0
    if config["kda_safe_gate"] and least >= 0:
        raise damaged(f"config.json gives {shown(least)} for kda_lower_bound, which must be a number below 0")
    options: dict[str, Any] = {"wide_decays": True, "sigmoid_gates": True, "least_decay": least}
    return DeltaSizes(heads, heads, width, width, taps, **options)


def _kind(config: Config, layer: int) -> str:
    return "linear_attention" if (layer + 1) % whole_number(config, "layer_group_size") else "full_attention"


def _settings(metadata: Metadata) -> dict[str, Any]:
    heads, width = metadata.number("attention.head_count"), metadata.number("kda.head_dim")
    least = metadata.get("kda.gate_lower_bound")
    if not isinstance(least, float) or not -math.inf < least < 0:
        path = metadata.file.path
        raise ModelError(
            f"{path} is damaged: its kda.gate_lower_bound is {shown(least)}, not a number below 0; download it again."
        )
    layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    return gguf_kda.settings(metadata) | {
        "expert_swiglu_limit_list": limits(metadata, "swiglu_clamp_exp", layers),
        "share_expert_swiglu_limit_list": limits(metadata, "swiglu_clamp_shexp", layers),
        "linear_head_dim": width,
        "linear_num_heads": heads,
        "kda_safe_gate": bool(metadata.get("kda.safe_gate", True)),
        "kda_lower_bound": least,
    }


FAMILIES = (
    Family(
        "bailing_hybrid",
        defaults={
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "head_dim": 64,
            "layer_group_size": 6,
            "short_conv_kernel_size": 4,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "max_position_embeddings": 262144,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        renamed=_renamed,
        stored_names=(
            (".word_embeddings.", ".embed_tokens."),
            (".attention.dense.", ".self_attn.o_proj."),
            (".attention.", ".self_attn."),
            (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
        ),
        decoder=DecoderRecord(
            mixer="delta-net",
            delta=_sizes,
            layer_kind=_kind,
            latents=True,
            head_gate=HeadGate("g_proj", whole=lambda config: True),
            rope_theta=6_000_000.0,
            limit=listed_limits("share_expert_swiglu_limit_list"),
        ),
        moe=MoeRecord(
            QWEN,
            GROUPED,
            shared="plain",
            limit=listed_limits("expert_swiglu_limit_list"),
            layers=sparse_layers(lambda config: whole_number(config, "first_k_dense_replace", default=2, minimum=0)),
            count_key="num_experts",
            ffn_key="moe_intermediate_size",
        ),
        extra_layers=True,
        gguf=GgufRecord(
            "bailingmoe3",
            "BailingHybridForCausalLM",
            settings=_settings,
            own_heads=True,
            mixer=gguf_kda.tensors(_sizes),
            mixed_layers="linear_attention",
            changes=gguf_kda.changes,
        ),
    ),
)
