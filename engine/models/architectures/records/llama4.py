"""Llama 4 without pictures.

Three of four layers see a chunk of the text, and only those rotate their heads; in the others queries grow with their
positions.
"""

from __future__ import annotations

from typing import Any

from engine.models.architectures.config_values import positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import experts
from engine.models.architectures.layer_rules import UNROTATED, check_kinds, layer_list, rotated_kinds
from engine.models.architectures.parts import GGUF, LAYER, fused, per_expert, prepared
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MoeRecord,
    QueryGrowth,
    RouterRecord,
)

_EXPERTS = LAYER + "feed_forward.experts"
_NAMES = {"mlp.shared_experts.": "feed_forward.shared_expert.", "mlp.": "feed_forward."}
"""Parts of the usual names of a checkpoint, and what they are in this family."""
_CHUNKED = "chunked_attention"
_CHUNK = 8192
"""Tokens of a chunk, and those after which queries grow, as llama.cpp has them."""
_WITHOUT_NORMS = 128
"""Experts of the model whose queries and keys have no norms, by which llama.cpp knows it."""


def _moe_layers(config: Config, layers: int) -> list[int]:
    listed = layer_list(config, "moe_layers")
    if listed is not None:
        return sorted(set(listed))
    step = whole_number(config, "interleave_moe_layer_step")
    return list(range(step - 1, layers, step))


def _kind(config: Config, layer: int) -> str:
    """Layers that rotate their heads see a chunk."""
    rotated = rotated_kinds(config, whole_number(config, "num_hidden_layers"))
    return "full_attention" if rotated[layer] == UNROTATED else _CHUNKED


def _chunks(config: Config, layers: int) -> list[int]:
    """Chunks of the layers that ``layer_types``, or else their rotation, says have some."""
    named = config.get("layer_types")
    if named is None:
        named = [_kind(config, layer) for layer in range(layers)]
    kinds = check_kinds(named, layers, ("full_attention", _CHUNKED))
    chunk = whole_number(config, "attention_chunk_size")
    return [chunk if kind == _CHUNKED else 0 for kind in kinds]


def _growth(config: Config) -> QueryGrowth | None:
    if not config["attn_temperature_tuning"]:
        return None
    by, step = (positive_number(config, key) for key in ("attn_scale", "floor_scale"))
    return QueryGrowth(by, step, ahead=1, unrotated=True)


def _settings(metadata: Metadata) -> dict[str, Any]:
    return {
        **experts("num_local_experts")(metadata),
        "intermediate_size": metadata.number("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.number("feed_forward_length"),
        "interleave_moe_layer_step": metadata.number("interleave_moe_layer_step", 1),
        "attention_chunk_size": _CHUNK,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "use_qk_norm": metadata.number("expert_count") != _WITHOUT_NORMS,
    }


LLAMA4_TEXT = Family(
    "llama4_text",
    whole="llama4",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "use_qk_norm": True,
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
    },
    decoder=DecoderRecord(
        names=_NAMES,
        layer_kind=_kind,
        ffn=lambda config, layer: whole_number(config, "intermediate_size_mlp"),
        head_kinds=rotated_kinds,
        unrotated=UNROTATED,
        windows=_chunks,
        chunked=True,
        query_growth=_growth,
        head_norm="rotated",
        head_norm_setting="use_qk_norm",
        rotated_first=True,
        paired_rotary=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        rope_theta=500_000.0,
    ),
    moe=MoeRecord(
        # Tools that quantise modules take the experts apart.
        (fused(_EXPERTS + ".", transposed=True), prepared(_EXPERTS + "."), per_expert(_EXPERTS), *GGUF),
        RouterRecord(("mlp.router.weight",), scoring="sigmoid", scales_input=True),
        shared="plain",
        shared_ffn=lambda config: whole_number(config, "intermediate_size"),
        layers=_moe_layers,
    ),
    gguf=GgufRecord("llama4", "Llama4ForCausalLM", settings=_settings),
)
FAMILIES = (LLAMA4_TEXT,)
