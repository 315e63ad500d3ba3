"""Qwen 3 and the language models of Qwen3-VL, without and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import qwen_experts
from engine.models.architectures.layer_rules import every_sparse_step, late_windows, switched_window
from engine.models.architectures.parts import MLP_EXPERTS, QWEN, fused
from engine.models.architectures.record import (
    SCALED_ROPE,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)

_MLX = MlxRecord("qwen3", rope_types=SCALED_ROPE, honours={"hidden_act": ("silu",), "attention_bias": (False,)})
_MLX_MOE = MlxRecord(
    "qwen3_moe", route="last-of-softmax", honours={"hidden_act": ("silu",), "attention_bias": (False,)}
)

QWEN3 = Family(
    "qwen3",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    decoder=DecoderRecord(
        windows=late_windows("use_sliding_window"),
        head_norm="per-head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    gguf=GgufRecord("qwen3", "Qwen3ForCausalLM"),
    mlx=_MLX,
    tokenizer_class="Qwen2Tokenizer",
)
QWEN3_MOE = Family(
    "qwen3_moe",
    defaults={
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    decoder=DecoderRecord(
        windows=switched_window, head_norm="per-head", qkv_bias="attention_bias", output_bias="attention_bias"
    ),
    moe=MoeRecord(
        QWEN,
        RouterRecord(("mlp.gate.weight",), normalise="norm_topk_prob"),
        layers=every_sparse_step,
        count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    gguf=GgufRecord("qwen3moe", "Qwen3MoeForCausalLM", settings=qwen_experts),
    mlx=_MLX_MOE,
    tokenizer_class="Qwen2Tokenizer",
)


def _rope(metadata: Metadata) -> dict[str, Any]:
    """Rotary settings of text and pictures. Texts have the same position in all sections."""
    sections = metadata.get("rope.dimension_sections")
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.real("rope.freq_base", 500_000.0),
            **({"mrope_section": sections[:3], "mrope_interleaved": True} if isinstance(sections, list) else {}),
        }
    }


QWEN3_VL = Family(
    "qwen3_vl_text",
    whole="qwen3_vl",
    defaults={"head_dim": 128, "num_key_value_heads": 32},
    decoder=DecoderRecord(
        head_norm="per-head", qkv_bias="attention_bias", output_bias="attention_bias", rope_theta=500_000.0
    ),
    gguf=GgufRecord("qwen3vl", "Qwen3VLForConditionalGeneration", settings=_rope),
    mlx=_MLX,
    tokenizer_class="Qwen2Tokenizer",
)
QWEN3_VL_MOE = Family(
    "qwen3_vl_moe_text",
    whole="qwen3_vl_moe",
    defaults={"num_key_value_heads": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 1},
    decoder=QWEN3_VL.decoder,
    moe=MoeRecord(
        # As they are published, they are transposed.
        (*QWEN, fused(MLP_EXPERTS + ".", transposed=True)),
        RouterRecord(("mlp.gate.weight",), normalise=True),
        layers=every_sparse_step,
        count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    gguf=GgufRecord(
        "qwen3vlmoe",
        "Qwen3VLMoeForConditionalGeneration",
        settings=lambda metadata: qwen_experts(metadata) | _rope(metadata),
    ),
    # transformers' configuration has no such setting.
    mlx=replace(_MLX_MOE, translate=lambda config: {"norm_topk_prob": True}),
    tokenizer_class="Qwen2Tokenizer",
)
FAMILIES = (QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE)
