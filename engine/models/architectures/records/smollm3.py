"""SmolLM3, every fourth layer of which does not rotate its heads."""

from __future__ import annotations

from engine.errors import damaged, shown
from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import paired_changes
from engine.models.architectures.layer_rules import by_type
from engine.models.architectures.record import SCALED_ROPE, Config, DecoderRecord, Family, GgufRecord, MlxRecord

_UNROTATED = "unrotated"


def _head_kinds(config: Config, layers: int) -> list[str]:
    """Kinds of heads by ``no_rope_layers``, which is 1 for layers that rotate them. Raises ModelError if it is not of
    so many layers."""
    rotated = config.get("no_rope_layers")
    if rotated is None:
        every = whole_number(config, "no_rope_layer_interval")
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers:
        raise damaged(f"config.json gives {shown(rotated)} for no_rope_layers, which must be one for each of {layers}")
    return ["full_attention" if one else _UNROTATED for one in rotated]


def _windows(config: Config, layers: int) -> list[int]:
    """Layers that do not rotate their heads, if ``use_sliding_window``, or as ``layer_types`` says."""
    used = bool(config.get("use_sliding_window"))
    return by_type(config, [used and kind == _UNROTATED for kind in _head_kinds(config, layers)], used)


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
            head_kinds=_head_kinds,
            unrotated=_UNROTATED,
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
