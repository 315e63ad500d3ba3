"""Settings of routed experts in the metadata of a GGUF file: parts of the records of families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.models.architectures.gguf_metadata import Metadata


def experts(count_key: str) -> Callable[[Metadata], dict[str, Any]]:
    """The number of experts, which the setting ``count_key`` is, and of those of a token."""

    def settings(metadata: Metadata) -> dict[str, Any]:
        return {
            count_key: metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
        }

    return settings


def qwen_experts(metadata: Metadata, normalised: bool = True) -> dict[str, Any]:
    """Settings of Qwen's experts. ``normalised``: whether their weights are divided by their sum if the file does not
    say it."""
    return {
        **experts("num_experts")(metadata),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        # The file may say otherwise than its architecture does.
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", normalised)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def grouped_experts(metadata: Metadata, normalised: bool) -> dict[str, Any]:
    """Settings of DeepSeek's experts, which are in groups, after layers without experts."""
    return {
        **experts("n_routed_experts")(metadata),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "n_shared_experts": metadata.number("expert_shared_count"),
        "routed_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", normalised)),
        "n_group": metadata.number("expert_group_count", 1),
        "topk_group": metadata.number("expert_group_used_count", 1),
        "first_k_dense_replace": metadata.number("leading_dense_block_count", 0),
    }
