"""Tiny random models of every family, written by transformers' own ``save_pretrained``: the oracles of the tests.

Every model has four decoder layers or fewer, odd feed-forward sizes, grouped-query attention where the family has it,
and what else the family knows: dense first layers, shared experts, sliding windows, norms of queries and keys, biases.
Routers and heads are scaled so that tokens go to different experts and the logits are far from uniform.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from tests.support.shared_folders import written_once

TINY_MOE_FAMILIES: tuple[str, ...] = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe_lite",
    "granitemoe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2_moe",
    "gemma4_text",
    "phimoe",
    "glm4_moe",
    "minimax",
    "dbrx",
    "llama4_text",
    "minimax_m2",
    "dots1",
    "hunyuan_v1_moe",
    "ernie4_5_moe",
    "exaone_moe",
    "granitemoehybrid",
    "solar_open",
    "hy_v3",
    "flex_olmo",
    "granitemoeshared",
    "nemotron_h",
    "nemotron_h_latents",
    "kimi_linear",
    "bailing_hybrid",
    "afmoe",
    "granitemoe_swa",
    "laguna",
    "cohere2_moe",
    "qwen4_exp_text",
    "deepseek_v32",
    "glm_moe_dsa",
    "mimo_v2_flash",
    "mistral4",
    "step3p5",
    "qwen3_vl_moe_text",
    "glm5_next_text",
    "deepseek_v4",
)
_KINDS_OF_FAMILIES = {
    "gemma4_dense": "gemma4_text",
    "gemma4_e2b": "gemma4_text",
    "granitemoehybrid_dense": "granitemoehybrid",
    "nemotron_h_dense": "nemotron_h",
    "nemotron_h_latents": "nemotron_h",
}
"""Further tiny models of families that have several kinds of them."""
TINY_DENSE_FAMILIES: tuple[str, ...] = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text"),
    *("gemma4_dense", "gemma4_e2b", "gemma4_unified_text", "gemma3_text", "ministral3"),
    *("phi3", "glm4", "ernie4_5", "hunyuan_v1_dense", "cohere", "cohere2"),
    *("granite", "lfm2", "smollm3", "seed_oss", "olmo2", "olmo3", "exaone4", "granitemoehybrid_dense"),
    "nemotron_h_dense",
    *("gemma2", "granite_swa", "apertus", "qwen3_vl_text", "gemma3n_text"),
)
TINY_FAMILIES: tuple[str, ...] = TINY_DENSE_FAMILIES + TINY_MOE_FAMILIES


def family_of(name: str) -> str:
    """The family of the tiny model ``name``, one of TINY_FAMILIES."""
    return _KINDS_OF_FAMILIES.get(name, name)


_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
"""Three layers of gated delta-net, the fourth with attention."""

_SPREAD_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Latent attention; experts in groups, of which the best two count."""
_INDEX: dict[str, Any] = {"index_topk": 13, "index_head_dim": 32, "index_n_heads": 12}
"""Indexers that choose in most tests' prompts, and not from the beginning. So many heads seldom all have products below
0, which would make scores equal."""

_KIMI_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
"""Delta-nets whose keys decay each by itself, the others with attention over latents."""

_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_key_value_heads": 3,
    "num_global_key_value_heads": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0,
}
"""Heads of two kinds."""

_HUNYUAN: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
}
"""Positions whose base is stretched."""
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 1.5,
    "logits_scaling": 0.8,
    "residual_multiplier": 0.9,
    "attention_multiplier": 0.3,
}
_GRANITE_HYBRID: dict[str, Any] = {
    **_GRANITE,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 20,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "position_embedding_type": "nope",
}
"""Mamba-2 layers, the second with attention."""
_NEMOTRON_H: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 20,
    "n_groups": 2,
    "chunk_size": 8,
}
"""Layers of one part each."""
_NEMOTRON_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "head_dim": 16,
        "mlp_only_layers": [0],
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 4.0},
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 16,
        # The family's own yarn scaling is kept; only the lengths are made small.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1, "q_lora_rank": 24, "num_mtp_layers": 0},
    "deepseek_v2": {
        **_LATENT,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral4": {
        **_LATENT,
        "q_lora_rank": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 24, "v_head_dim": 20, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {**_LATENT, **_INDEX, "first_k_dense_replace": 1, "q_lora_rank": 24, "num_mtp_layers": 0},
    "glm_moe_dsa": {
        **_LATENT,
        **_INDEX,
        "q_lora_rank": 24,
        "v_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "full"],
        "num_mtp_layers": 0,
    },
    "granitemoe": {
        **_GRANITE,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "phimoe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 16,
    },
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
        "num_mtp_layers": 0,
    },
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {
        **_DELTA_NET,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "qwen3_next": {
        **_DELTA_NET,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "qwen4_exp_text": {
        **_DELTA_NET,
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "hc_count": 3,
        "hc_lowrank": 20,
        "output_gate_type": "sigmoid",
        "ple_layer_ids": [2],
        "ple_embed_dim": 24,
        "ple_conv_kernel_size": 3,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 5,
        "indexer_n_heads": 6,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 12,
        "indexer_compress_ratio": 4,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
    },
    "gemma4_text": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_dense": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_unified_text": {**_GEMMA4, "attention_k_eq_v": True},
    "gemma4_e2b": {
        **_GEMMA4,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": 160,
        "use_double_wide_mlp": True,
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": 150,
        "laurel_rank": 12,
        "activation_sparsity_pattern": [0.9, 0.7, 0.0, 0.0, 0.5, 0.0],
    },
    "gemma3_text": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    },
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "phi3": {"sliding_window": 16, "original_max_position_embeddings": 512},
    "glm4": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    "dots1": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": {**_HUNYUAN, "num_experts": 8, "moe_topk": 3},
    "ernie4_5_moe": {
        "head_dim": 16,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
    },
    "exaone_moe": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "num_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "solar_open": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "hy_v3": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "num_shared_experts": 2,
    },
    "afmoe": {
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "num_shared_experts": 1,
        "route_scale": 2.5,
        "mup_enabled": True,
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 17,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
    },
    "laguna": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [4, 6, 6, 4],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "moe_routed_scaling_factor": 1.5,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
    },
    "step3p5": {
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "mlp_layer_types": ["dense", "dense", *["sparse"] * 3],
        "num_attention_heads": 4,
        "num_sliding_attention_heads": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "share_expert_dim": 72,
        "moe_router_scaling_factor": 1.5,
        "swiglu_limits": [0.0, 0.0, 0.0, 0.3, 0.2],
        "swiglu_limits_shared": [0.0, 0.4, None, 0.0, 0.5],
        "rope_theta": [500_000.0, *[10_000.0] * 3, 500_000.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5],
    },
    "cohere2_moe": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "sliding_window": 16,
        "logit_scale": 0.5,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 72,
    },
    "gemma2": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 16,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 10.0,
    },
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 3},
    "cohere": {"logit_scale": 0.5, "num_hidden_layers": 4},
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 16, "logit_scale": 0.5},
    "apertus": {},
    "qwen3_vl_text": {"head_dim": 16, "rope_parameters": _SPREAD_ROPE},
    "qwen3_vl_moe_text": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "head_dim": 16,
        "mlp_only_layers": [0],
        "tie_word_embeddings": False,
        "rope_parameters": _SPREAD_ROPE,
    },
    "granite": _GRANITE,
    "granitemoeshared": {
        **_GRANITE,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
    },
    "granite_swa": {
        **_GRANITE,
        "num_hidden_layers": 5,
        "sliding_window": 16,
        "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0, 0],
    },
    "granitemoe_swa": {
        **_GRANITE,
        "num_hidden_layers": 5,
        "sliding_window": 16,
        "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0, 0],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
    },
    "granitemoehybrid": {**_GRANITE_HYBRID, "num_local_experts": 8, "num_experts_per_tok": 3},
    "granitemoehybrid_dense": {**_GRANITE_HYBRID, "num_local_experts": 0, "tie_word_embeddings": True},
    "nemotron_h": {
        **_NEMOTRON_H,
        **_NEMOTRON_EXPERTS,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    },
    "nemotron_h_latents": {
        **_NEMOTRON_H,
        **_NEMOTRON_EXPERTS,
        "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_latent_size": 24,
    },
    "nemotron_h_dense": {
        **_NEMOTRON_H,
        "layer_types": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    },
    "kimi_linear": {
        **_KIMI_DELTA,
        "linear_head_dim": 20,
        "linear_num_heads": 6,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    },
    "bailing_hybrid": {
        **_KIMI_DELTA,
        "head_dim": 20,
        "layer_group_size": 2,
        "short_conv_kernel_size": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_mtp_layers": 0,
    },
    "glm5_next_text": {
        **_LATENT,
        **_INDEX,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared", "full"],
        "q_lora_rank": 24,
        "qk_rope_head_dim": 0,
        "v_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 12,
        "index_kpool": 4,
        "linear_head_dim": 20,
        "linear_num_heads": 6,
        "swiglu_limit": 1.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 4,
    },
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "partial_rotary_factor": 1 / 3,
        "q_lora_rank": 20,
        "o_groups": 2,
        "o_lora_rank": 28,
        "sliding_window": 16,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "index_topk": 3,
        "index_head_dim": 16,
        "index_n_heads": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "swiglu_limit": 1.5,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_multiple_of": 8,
    },
    "smollm3": {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 2_000_000.0}},
    "seed_oss": {"head_dim": 16},
    "olmo2": {},
    "olmo3": {
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 16},
    "minimax": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "block_size": 8,
        "num_hidden_layers": 4,
        "full_attn_alpha_factor": 1.2,
        "linear_attn_alpha_factor": 1.1,
        "mlp_alpha_factor": 1.3,
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 4.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 72,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "num_hidden_layers": 4,
        "floor_scale": 16,
    },
}
_PUBLISHED = {
    "kimi_linear": (r"\.block_sparse_moe\.(gate|up|down)_proj", r".mlp.\1_proj"),
    "bailing_hybrid": (r"(layers\.[02])\.attention\.dense", r"\1.attention.o_proj"),
}
"""Names of tensors, as transformers saves them, that are others in published files, and those."""
_DBRX_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "intermediate_size": None,
    "num_key_value_heads": None,
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """The transformers configuration of the tiny model of ``family``, with ``overrides``."""
    from transformers import AutoConfig

    # Some configurations change the tables that they are given.
    values = copy.deepcopy(_COMMON | _FAMILIES[family] | overrides)
    if family == "dbrx":
        values = {_DBRX_NAMES.get(name, name) or "": value for name, value in values.items()}
        values.pop("", None)
    return AutoConfig.for_model(family_of(family), **values)


ENDLESS = 1_000_000
"""A context in which an answer does not end before it is stopped."""

kept_in: Path | None = None
"""Folder in which a run of the tests keeps every tiny model that it has made. None: each call makes one."""


def write_tiny_model(folder: Path, family: str, **options: Any) -> Path:
    """Write a random model of ``family`` (one of TINY_FAMILIES) into ``folder`` and return ``folder``.

    ``options``: ``dtype``, torch's name of the stored type; ``shards``, whether the weights are split over several
    files with an index; ``seed``; and settings of the configuration. The same arguments give the same weights. There is
    no tokenizer.
    """
    if kept_in is None:
        _make(folder, family, **options)
    else:
        shutil.copytree(
            tiny_model_kept(kept_in, family, **options), folder, dirs_exist_ok=True, copy_function=shutil.copyfile
        )
    return folder


def tiny_model_kept(root: Path, family: str, **options: Any) -> Path:
    """The folder of that tiny model in ``root``, made by the process that needs it first. Not to be changed."""
    key = zlib.crc32(repr(sorted(options.items())).encode())
    return written_once(root / f"{family}-{key:08x}", lambda folder: _make(folder, family, **options))


def _make(
    folder: Path, family: str, *, dtype: str = "float32", seed: int = 0, shards: bool = False, **config_overrides: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from engine.runtimes.torch.language_models import register_language_model

    torch.manual_seed(seed)
    config = tiny_config(family, **config_overrides)
    register_language_model(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    fill_randomly(model, family, seed)
    model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=max(1024, total // 4) if shards else "5GB")
    if family in _PUBLISHED:
        _rename_tensors(folder, *_PUBLISHED[family])


def _rename_tensors(folder: Path, pattern: str, instead: str) -> None:
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = {re.sub(pattern, instead, name): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        whole = json.loads(index.read_text())
        whole["weight_map"] = {re.sub(pattern, instead, name): file for name, file in whole["weight_map"].items()}
        index.write_text(json.dumps(whole))


def fill_randomly(model: Any, family: str, seed: int = 0) -> None:
    """Give every weight of ``model`` a random value, always the same."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(family.encode()) + seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator, family, tied=model.config.tie_word_embeddings)
        for name, buffer in model.named_buffers():
            if name.endswith("act_fn.beta"):
                buffer.fill_(0.4)
            elif name.endswith("tid2eid"):
                scores = torch.rand(len(buffer), model.config.n_routed_experts, generator=generator)
                buffer.copy_(scores.topk(buffer.shape[1]).indices)
            elif name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar", "std_scale")):
                buffer.normal_(float(name.endswith(("layer_scalar", "std_scale"))), 0.1, generator=generator)
            elif name.endswith("std_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)


def _fill(name: str, parameter: Any, generator: Any, family: str, *, tied: bool) -> None:
    """Random values of a scale that keeps signals of every layer near one."""
    gemma = family.startswith("gemma")
    if "act_fn.alpha_" in name:
        parameter.normal_(0.1, 0.5, generator=generator)
    elif name.endswith(("bias", "sinks")):
        parameter.normal_(0.0, 0.3, generator=generator)
    elif family.startswith(("gemma4", "gemma3n")) and name.endswith(
        ("q_norm.weight", "k_norm.weight")
    ):  # their products are not divided by anything
        parameter.normal_(0.7, 0.1, generator=generator)
    elif "norm" in name.rsplit(".", 2)[-2] or name.endswith("scale"):
        # gemma2's and gemma3's norms multiply by one more.
        parameter.normal_(0.0 if family in ("gemma2", "gemma3_text") else 1.0, 0.2, generator=generator)
    elif "embed" in name or name.endswith("wte.weight"):
        # gemma's embeddings are multiplied by the root of their width.
        usual = 0.02 if family == "gemma2" else 0.1 if gemma else 0.4
        parameter.normal_(0.0, usual if tied else 1.0, generator=generator)
    elif name.endswith("_coefs.weight"):
        parameter.normal_(0.0, 0.2, generator=generator)
    elif name.endswith("modality_router.weight"):  # what comes in is divided by its width
        parameter.normal_(0.0, 5.0, generator=generator)
    elif gemma and name.endswith("router.proj.weight"):  # what comes in is divided by the root of its width
        parameter.normal_(0.0, 2.0, generator=generator)
    else:
        is_router = name.endswith(("gate.weight", "gate.wg.weight", "router.weight", "router.layer.weight"))
        is_head = name.endswith("lm_head.weight")
        gain = 3.0 if is_router or is_head else 1.3
        inputs = parameter.shape[-1] if parameter.dim() < 3 else min(parameter.shape[-2:])
        parameter.normal_(0.0, gain / inputs**0.5, generator=generator)
