"""Llama 2 and 3, Mistral, whose GGUF files call themselves llama, and Ministral 3, whose queries grow with their
positions."""

from typing import Any

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import paired_changes
from engine.models.architectures.layer_rules import growing_queries, one_window
from engine.models.architectures.record import (
    SCALED_ROPE,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
)

_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _slides(metadata: Metadata) -> bool:
    return 0 < metadata.number("attention.sliding_window", 0) < metadata.number("context_length")


LLAMA = Family(
    "llama",
    decoder=DecoderRecord(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    gguf=GgufRecord("llama", "LlamaForCausalLM", paired_rotary=True, changes=paired_changes),
    mlx=MlxRecord("llama", rope_types=SCALED_ROPE),
)
MISTRAL = Family(
    "mistral",
    whole="mistral3",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    decoder=DecoderRecord(windows=one_window),
    gguf=GgufRecord(
        "llama",
        "MistralForCausalLM",
        when=_slides,
        settings=lambda metadata: {"sliding_window": metadata.number("attention.sliding_window")},
        paired_rotary=True,
        changes=paired_changes,
    ),
    mlx=MlxRecord("llama", rope_types=SCALED_ROPE),
    tokenizer_class="TokenizersBackend",
    keeps_llama_tokenizer=True,
)


def _growing(metadata: Metadata) -> dict[str, Any]:
    """Rotary settings beyond those of yarn."""
    return {
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": metadata.short_real("attention.temperature_scale", 0.0),
    }


def _plain_rope(metadata: Metadata) -> dict[str, Any]:
    """Files of Mistral Small call themselves mistral3, too, and scale nothing."""
    if metadata.get("rope.scaling.type", "none") == "yarn":
        return {}
    rope = {
        "rope_type": "default",
        "rope_theta": metadata.real("rope.freq_base", 10_000.0),
        "original_max_position_embeddings": metadata.number("context_length"),
        "llama_4_scaling_beta": 0.0,
    }
    return {"rope_parameters": rope}


MINISTRAL3 = Family(
    "ministral3",
    whole="mistral3",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    decoder=DecoderRecord(
        windows=one_window, query_growth=growing_queries(_MINISTRAL_ROPE), rope_theta=1_000_000.0, rope=_MINISTRAL_ROPE
    ),
    gguf=GgufRecord(
        "mistral3",
        "Ministral3ForCausalLM",
        settings=_plain_rope,
        yarn=_growing,
        paired_rotary=True,
        changes=paired_changes,
    ),
    mlx=MlxRecord(
        "ministral3",
        rope_types=SCALED_ROPE,
        nested_rotary=True,
        honours={"hidden_act": ("silu",), "sliding_window": (None,)},
    ),
    tokenizer_class="TokenizersBackend",
)
FAMILIES = (LLAMA, MISTRAL, MINISTRAL3)
