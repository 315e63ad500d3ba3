"""Cohere's models: attention and the feed-forward network run beside each other. In those of the second generation
three of four layers see a window, and only those rotate their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.architectures.config_values import positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import sliding_layers
from engine.models.architectures.layer_rules import UNROTATED, full_every, kind_windows, kinds_by, sparse_layers
from engine.models.architectures.parts import QWEN
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)

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
        centred_norms=lambda config: True,
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


def _moe_kind(config: Config, layer: int) -> str:
    """The first layers, without experts, have a pattern of their own."""
    dense = whole_number(config, "first_k_dense_replace", default=0, minimum=0)
    setting = "prefix_dense_sliding_window_pattern" if layer < dense else "sliding_window_pattern"
    place = layer if layer < dense else layer - dense
    return "sliding_attention" if (place + 1) % whole_number(config, setting) else "full_attention"


_MOE_KINDS = kinds_by(_moe_kind)
_moe_layers = sparse_layers(lambda config: whole_number(config, "first_k_dense_replace", default=0, minimum=0))


def _moe_head_kinds(config: Config, layers: int) -> list[str]:
    """Layers with a window rotate their heads, and those without experts do if they all see everything."""
    sparse, whole = _moe_layers(config, layers), whole_number(config, "prefix_dense_sliding_window_pattern") == 1
    slides = config.get("sliding_window") is not None
    return [
        "rotated" if (slides and kind == "sliding_attention") or (whole and layer not in sparse) else UNROTATED
        for layer, kind in enumerate(_MOE_KINDS(config, layers))
    ]


def _by_sigmoid(config: Config) -> bool:
    return config.get("expert_selection_fn") == "sigmoid"


def _half(config: Config) -> float:
    """What experts and shared experts are multiplied by where their average is taken."""
    averaged = config.get("shared_expert_combination_strategy") == "average"
    return 0.5 if averaged and config.get("num_shared_experts") else 1.0


COHERE2_MOE = replace(
    COHERE2,
    model_type="cohere2_moe",
    defaults={
        **COHERE2.defaults,
        "head_dim": 128,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        "prefix_dense_sliding_window_pattern": 1,
        "sliding_window_pattern": 4,
    },
    renamed=lambda config: {"layer_norm_eps": config["rms_norm_eps"]} if config.get("rms_norm_eps") else {},
    decoder=replace(
        COHERE2.decoder,
        centred_norms=lambda config: config.get("rms_norm_eps") is None,
        layer_kind=_moe_kind,
        head_kinds=_moe_head_kinds,
        windows=kind_windows(_MOE_KINDS),
        ffn=lambda config, layer: whole_number(config, "prefix_dense_intermediate_size", "intermediate_size"),
    ),
    moe=MoeRecord(
        QWEN,
        RouterRecord(
            ("mlp.gate.weight",),
            scoring_setting="expert_selection_fn",
            # A softmax over the chosen logits alone is the whole softmax, divided by the sum of the chosen.
            normalise=lambda config: not _by_sigmoid(config) or bool(config.get("norm_topk_prob")),
            scale=_half,
        ),
        shared="plain",
        shared_ffn=lambda config: (
            whole_number(config, "intermediate_size") * whole_number(config, "num_shared_experts", minimum=0)
        ),
        shared_scale=_half,
        layers=_moe_layers,
        count_key="num_experts",
    ),
    extra_layers=True,
    gguf=None,
    mlx=None,
    tokenizer_class="",
)
FAMILIES = (COHERE, COHERE2, COHERE2_MOE)
