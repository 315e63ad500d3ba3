"""Phi 3 and 4, without experts: projections of the same input are one matrix."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import rotated_part
from engine.models.architectures.layer_rules import one_window
from engine.models.architectures.record import DecoderRecord, Family, GgufRecord, MlxRecord


def _settings(metadata: Metadata) -> dict[str, Any]:
    """Raises ModelError for files that scale their positions."""
    if "rope_factors_long.weight" in metadata.file.tensors:
        raise ModelError(
            f"{metadata.file.path} scales its positions by 'longrope', which is not supported; use another model."
        )
    return {
        "sliding_window": metadata.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": metadata.number(
            "rope.scaling.original_context_length", metadata.number("context_length")
        ),
        "partial_rotary_factor": rotated_part(metadata),
        "pad_token_id": None,
    }


FAMILIES = (
    Family(
        "phi3",
        defaults={"rms_norm_eps": 1e-5},
        decoder=DecoderRecord(windows=one_window, merged_attention=True, merged_ffn=True, rotated=1.0),
        gguf=GgufRecord("phi3", "Phi3ForCausalLM", settings=_settings, own_heads=True),
        mlx=MlxRecord("phi3", partial_rotary=True),
        tokenizer_class="TokenizersBackend",
        tokenizer_overridden=("phi3",),
    ),
)
