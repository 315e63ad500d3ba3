"""Shapes of models that are only measured as packed files. The depth is cut so that a file has about 3 GB, and the
vocabulary by the same factor, so that the head keeps its share of what a token reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class PackedShape(Protocol):
    """A model that :func:`benchmarks.packed_export.write_packed` can write."""

    @property
    def title(self) -> str: ...

    @property
    def layers(self) -> int: ...

    def config(self) -> dict[str, Any]:
        """The model's ``config.json``."""
        ...


def _base(class_name: str, family: str, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": [class_name],
        "model_type": family,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@dataclass(frozen=True)
class GlmFlashShape:
    """The defaults are GLM-4.7-Flash's, but for a sixth of its layers and of its vocabulary. The first layer is
    dense, as the real one's."""

    layers: int = 8
    hidden: int = 2048
    dense_ffn: int = 10240
    ffn: int = 1536
    experts: int = 64
    experts_per_token: int = 4
    heads: int = 20
    query_rank: int = 768
    latents: int = 512
    plain: int = 192
    rotated: int = 64
    values: int = 256
    vocabulary: int = 154880 // 6

    # A router of sigmoids gives nearly the same weight to all chosen experts, and rounding decides which is the last of
    # them. One expert must be little beside what came before it, or engines that round otherwise could not be compared.
    embedding_scale: ClassVar[float] = 6.0
    title: ClassVar[str] = "Synthetic GLM-4.7-Flash-shaped"

    def config(self) -> dict[str, Any]:
        return {
            **_base("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_ffn,
            "moe_intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "mlp_layer_types": ["sparse" if layer else "dense" for layer in range(self.layers)],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.latents,
            "qk_nope_head_dim": self.plain,
            "qk_rope_head_dim": self.rotated,
            "v_head_dim": self.values,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.experts_per_token,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        }


@dataclass(frozen=True)
class Qwen3NextShape:
    """The defaults are Qwen3-Next-80B-A3B's, but for a twelfth of its layers and of its vocabulary: three delta-nets
    and one layer with full attention."""

    layers: int = 4
    hidden: int = 2048
    ffn: int = 512
    experts: int = 512
    experts_per_token: int = 10
    heads: int = 16
    key_value_heads: int = 2
    head_width: int = 256
    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_width: int = 128
    vocabulary: int = 151936 // 12

    embedding_scale: ClassVar[float] = 2.0
    title: ClassVar[str] = "Synthetic Qwen3-Next-80B-A3B-shaped"

    def config(self) -> dict[str, Any]:
        return {
            **_base("Qwen3NextForCausalLM", "qwen3_next"),
            "hidden_size": self.hidden,
            "head_dim": self.head_width,
            "intermediate_size": 10 * self.ffn,
            "moe_intermediate_size": self.ffn,
            "shared_expert_intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "layer_types": [
                "linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(self.layers)
            ],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": self.linear_width,
            "linear_value_head_dim": self.linear_width,
            "linear_num_key_heads": self.linear_key_heads,
            "linear_num_value_heads": self.linear_value_heads,
            "partial_rotary_factor": 0.25,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e7,
        }


@dataclass(frozen=True)
class Gemma4Shape:
    """The defaults are Gemma-4-26B-A4B's, but for a fifth of its layers and of its vocabulary: five layers with a
    sliding window and one with full attention."""

    layers: int = 6
    hidden: int = 2816
    dense_ffn: int = 2112
    ffn: int = 704
    experts: int = 128
    experts_per_token: int = 8
    heads: int = 16
    key_value_heads: int = 8
    head_width: int = 256
    wide_key_value_heads: int = 2
    wide_head_width: int = 512
    window: int = 1024
    vocabulary: int = 262144 // 5

    # As GLM-4.7-Flash's; what comes of the embedding is multiplied by the root of the width.
    embedding_scale: ClassVar[float] = 6.0 * 2816**-0.5
    title: ClassVar[str] = "Synthetic Gemma-4-26B-A4B-shaped"

    def config(self) -> dict[str, Any]:
        return {
            **_base("Gemma4ForCausalLM", "gemma4_text", tied=True),
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden,
            "head_dim": self.head_width,
            "global_head_dim": self.wide_head_width,
            "intermediate_size": self.dense_ffn,
            "moe_intermediate_size": self.ffn,
            "enable_moe_block": True,
            "num_hidden_layers": self.layers,
            "layer_types": [
                "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(self.layers)
            ],
            "sliding_window": self.window,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "num_global_key_value_heads": self.wide_key_value_heads,
            "attention_k_eq_v": True,
            "num_experts": self.experts,
            "top_k_experts": self.experts_per_token,
            "final_logit_softcapping": 30.0,
            "partial_rotary_factor": 0.25,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_theta_sliding": 1e4,
        }


@dataclass(frozen=True)
class Lfm2MoeShape:
    """The defaults are LFM2-8B-A1B's, but for half of its layers and of its vocabulary: nine convolutions and three
    layers with attention. The first layer is dense, where the real model has two."""

    layers: int = 12
    hidden: int = 2048
    dense_ffn: int = 7168
    ffn: int = 1792
    experts: int = 32
    experts_per_token: int = 4
    heads: int = 32
    key_value_heads: int = 8
    dense_layers: int = 1
    vocabulary: int = 65536 // 2

    # As GLM-4.7-Flash's.
    embedding_scale: ClassVar[float] = 6.0
    title: ClassVar[str] = "Synthetic LFM2-8B-A1B-shaped"

    def config(self) -> dict[str, Any]:
        return {
            **_base("Lfm2MoeForCausalLM", "lfm2_moe", tied=True),
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_ffn,
            "moe_intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention" if layer % 4 == 2 else "conv" for layer in range(self.layers)],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "conv_L_cache": 3,
            "conv_bias": False,
            "num_dense_layers": self.dense_layers,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
        }


@dataclass(frozen=True)
class GlmAirShape:
    """The defaults are GLM-4.5-Air's, but for a fifteenth of its layers and of its vocabulary. The first layer is
    dense, as the real one's."""

    layers: int = 3
    hidden: int = 4096
    dense_ffn: int = 10944
    ffn: int = 1408
    experts: int = 128
    experts_per_token: int = 8
    heads: int = 96
    key_value_heads: int = 8
    head_width: int = 128
    vocabulary: int = 151552 // 15

    # As GLM-4.7-Flash's.
    embedding_scale: ClassVar[float] = 6.0
    title: ClassVar[str] = "Synthetic GLM-4.5-Air-shaped"

    def config(self) -> dict[str, Any]:
        return {
            **_base("Glm4MoeForCausalLM", "glm4_moe"),
            "hidden_size": self.hidden,
            "head_dim": self.head_width,
            "intermediate_size": self.dense_ffn,
            "moe_intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "attention_bias": True,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.experts_per_token,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        }
