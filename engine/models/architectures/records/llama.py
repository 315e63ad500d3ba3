"""Llama 2 and 3, and Mistral, whose GGUF files call themselves llama."""

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import paired_changes
from engine.models.architectures.layer_rules import one_window
from engine.models.architectures.record import SCALED_ROPE, DecoderRecord, Family, GgufRecord, MlxRecord


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
FAMILIES = (LLAMA, MISTRAL)
