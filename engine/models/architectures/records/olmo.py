"""OLMo 2 and 3 and FlexOlmo, with experts, whose layers have norms only after their parts. Three of four layers of OLMo
3 see a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import sliding_layers
from engine.models.architectures.layer_rules import KINDS, full_every, kind_windows, kinds_by, rope_by_kind
from engine.models.architectures.parts import QWEN
from engine.models.architectures.record import (
    SCALED_ROPE,
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)

_KIND = full_every("", 4)
_KINDS = kinds_by(_KIND)
_USUAL_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
_rope = rope_by_kind(_USUAL_ROPE, _USUAL_ROPE, dict.fromkeys(KINDS, "rope_theta"))


def _slides(metadata: Metadata) -> bool:
    return metadata.number("attention.sliding_window", 0) > 0


def _settings(metadata: Metadata) -> dict[str, Any]:
    return {
        "layer_types": sliding_layers(metadata, 4),
        "sliding_window": metadata.number("attention.sliding_window"),
    }


def _unlike(config: Config) -> str | None:
    """mlx-lm knows one base for both kinds of layers, and scales only those with full attention."""
    full, local = (_rope(config, kind) for kind in ("full_attention", "sliding_attention"))
    if local["rope_theta"] != full["rope_theta"]:
        return f"rope_parameters {local!r} of sliding_attention"
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"]
    return None if {"sliding_attention", "full_attention"} <= set(kinds) else f"layer_types {kinds!r}"


DECODER = DecoderRecord(norms="after", head_norm="whole", qkv_bias="attention_bias", output_bias="attention_bias")
OLMO2 = Family(
    "olmo2",
    defaults={"rms_norm_eps": 1e-5},
    decoder=DECODER,
    gguf=GgufRecord("olmo2", "Olmo2ForCausalLM"),
    mlx=MlxRecord("olmo2", rope_types=SCALED_ROPE, honours={"hidden_act": ("silu",)}),
    tokenizer_class="TokenizersBackend",
)
OLMO3 = Family(
    "olmo3",
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    decoder=replace(
        DECODER,
        layer_kind=_KIND,
        head_kinds=_KINDS,
        kind_rope=_rope,
        windows=kind_windows(_KINDS),
    ),
    gguf=GgufRecord(
        "olmo2",
        "Olmo3ForCausalLM",
        when=_slides,
        settings=_settings,
        sliding_rope=lambda metadata: {
            "rope_type": "default",
            "rope_theta": metadata.real("rope.freq_base", 10_000.0),
        },
    ),
    mlx=MlxRecord("olmo3", rope_types=SCALED_ROPE, windowed=True, honours={"hidden_act": ("silu",)}, checks=(_unlike,)),
    tokenizer_class="TokenizersBackend",
)
FLEX = Family(
    "flex_olmo",
    defaults={"num_experts_per_tok": 5, "norm_topk_prob": False},
    decoder=replace(DECODER, rope_theta=500_000.0),
    moe=MoeRecord(QWEN, RouterRecord(("mlp.gate.weight",), normalise="norm_topk_prob"), count_key="num_experts"),
    tokenizer_class="TokenizersBackend",
)
FAMILIES = (OLMO2, OLMO3, FLEX)
