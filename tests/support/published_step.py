"""Tiny models of Step 3.5 with the names, tensors and settings of the published files."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.gate.weight": ".moe.gate.weight",
    ".mlp.shared_experts.": ".share_expert.",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
}
"""Parts of names in transformers, and in the published files."""

PUBLISHED: dict[str, Any] = {
    "model_type": "step3p5",
    "vocab_size": 128896,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
    "sliding_window": 512,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0] * 44 + [16.0, 0.0, 0.0, 0.0],
    "num_nextn_predict_layers": 3,
    "rms_norm_eps": 1e-5,
}
"""Settings as the published file has them."""


def as_published(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """``tensors`` as transformers saves them under the published names, gate and up of experts apart."""
    found: dict[str, NDArray[Any]] = {}
    for name, array in tensors.items():
        stem, _, kind = name.partition(".mlp.experts.")
        if kind == "gate_up_proj":
            for part, rows in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                found[f"{stem}.moe.{part}_proj.weight"] = np.ascontiguousarray(rows)
        else:
            found[functools.reduce(lambda text, pair: text.replace(*pair), _NAMES.items(), name)] = array
    return found
