"""SmolLM3, every fourth layer of which does not rotate its heads."""

from __future__ import annotations

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import paired_changes
from engine.models.architectures.layer_rules import UNROTATED, by_type, rotated_kinds
from engine.models.architectures.record import SCALED_ROPE, Config, DecoderRecord, Family, GgufRecord, MlxRecord


def _windows(config: Config, layers: int) -> list[int]:
    """Layers that do not rotate their heads, if ``use_sliding_window``, or as ``layer_types`` says."""
    used = bool(config.get("use_sliding_window"))
    return by_type(config, [used and kind == UNROTATED for kind in rotated_kinds(config, layers)], used)


def _settings(metadata: Metadata) -> dict[str, object]:
    layers = metadata.number("block_count")
    # Nothing is padded here, and the library's default is a token that other vocabularies have not.
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)], "pad_token_id": None}


FAMILIES = (
    Family(
        "smollm3",
        defaults={
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        decoder=DecoderRecord(
            head_kinds=rotated_kinds,
            unrotated=UNROTATED,
            windows=_windows,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            rope_theta=2_000_000.0,
        ),
        gguf=GgufRecord(
            "smollm3", "SmolLM3ForCausalLM", settings=_settings, paired_rotary=True, changes=paired_changes
        ),
        mlx=MlxRecord("smollm3", rope_types=SCALED_ROPE, honours={"hidden_act": ("silu",)}),
    ),
)
