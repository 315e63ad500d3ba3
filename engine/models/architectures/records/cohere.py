"""Cohere's models: attention and the feed-forward network run beside each other. In those of the second generation
three of four layers see a window, and only those rotate their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.architectures.config_values import positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import sliding_layers
from engine.models.architectures.layer_rules import UNROTATED, full_every, kind_windows, kinds_by
from engine.models.architectures.record import Config, DecoderRecord, Family, GgufRecord, MlxRecord

_KIND = full_every("sliding_window_pattern", 4)
_KINDS = kinds_by(_KIND)


def _head_kinds(config: Config, layers: int) -> list[str]:
    slides = config.get("sliding_window") is not None
    return [kind if slides and kind == "sliding_attention" else UNROTATED for kind in _KINDS(config, layers)]


def _settings(metadata: Metadata) -> dict[str, Any]:
    return {
        "layer_norm_eps": metadata.short_real("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": metadata.short_real("logit_scale", 1.0),
    }


def _windowed_settings(metadata: Metadata) -> dict[str, Any]:
    return {
        **_settings(metadata),
        "layer_types": sliding_layers(metadata, 4),
        "sliding_window": metadata.number("attention.sliding_window"),
    }


def _pattern(config: Config) -> int:
    """How many layers there are to one that sees everything, which is the last of them; 0 if they are not regular."""
    kinds = _KINDS(config, whole_number(config, "num_hidden_layers"))
    every = next((layer + 1 for layer, kind in enumerate(kinds) if kind == "full_attention"), 0)
    regular = all((kind == "full_attention") == ((i + 1) % (every or 1) == 0) for i, kind in enumerate(kinds))
    return every if regular else 0


def _irregular(config: Config) -> str | None:
    """mlx-lm knows regular kinds of layers only."""
    if "num_hidden_layers" not in config or _pattern(config):
        return None
    return f"layer_types {config.get('layer_types')!r}"


COHERE = Family(
    "cohere",
    defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    decoder=DecoderRecord(
        norms="beside",
        centred_norms=True,
        paired_rotary=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        logits_divisor=lambda config: 1 / positive_number(config, "logit_scale"),
        epsilon_setting="layer_norm_eps",
        rope_theta=500_000.0,
    ),
    gguf=GgufRecord("command-r", "CohereForCausalLM", settings=_settings),
    mlx=MlxRecord("cohere", honours={"hidden_act": ("silu",), "tie_word_embeddings": (True,)}),
    tokenizer_class="CohereTokenizer",
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    defaults={**COHERE.defaults, "sliding_window": 4096},
    decoder=replace(
        COHERE.decoder,
        layer_kind=_KIND,
        head_kinds=_head_kinds,
        unrotated=UNROTATED,
        windows=kind_windows(_KINDS),
        rope_theta=10_000.0,
    ),
    gguf=GgufRecord("cohere2", "Cohere2ForCausalLM", settings=_windowed_settings),
    mlx=MlxRecord(
        "cohere2",
        windowed=True,
        honours={"hidden_act": ("silu",), "tie_word_embeddings": (True,)},
        checks=(_irregular,),
        translate=lambda config: {"sliding_window_pattern": _pattern(config)},
    ),
)
FAMILIES = (COHERE, COHERE2)
