"""Qwen 3, without and with experts, and the language model of Qwen3-VL without experts."""

from __future__ import annotations

from typing import Any

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import qwen_experts
from engine.models.architectures.layer_rules import every_sparse_step, late_windows, switched_window
from engine.models.architectures.parts import QWEN
from engine.models.architectures.record import (
    SCALED_ROPE,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
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
    mlx=MlxRecord("qwen3", rope_types=SCALED_ROPE, honours={"hidden_act": ("silu",), "attention_bias": (False,)}),
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
    mlx=MlxRecord(
        "qwen3_moe",
        route="last-of-softmax",
        honours={"hidden_act": ("silu",), "attention_bias": (False,)},
    ),
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
    tokenizer_class="Qwen2Tokenizer",
)
FAMILIES = (QWEN3, QWEN3_MOE, QWEN3_VL)
