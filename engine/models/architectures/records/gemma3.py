"""Gemma 3: five of six layers see a window, with rotary settings of their own."""

from __future__ import annotations

from typing import Any

from engine.models.architectures.config_values import positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import sliding_layers, without_ones
from engine.models.architectures.layer_rules import full_every, kind_windows, kinds_by, rope_by_kind
from engine.models.architectures.record import SCALED_ROPE, Config, DecoderRecord, Family, GgufRecord, MlxRecord

_KIND = full_every("sliding_window_pattern", 6)
_KINDS = kinds_by(_KIND)
_rope = rope_by_kind(
    {"rope_type": "default", "rope_theta": 1_000_000.0},
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
)
_LAYERS_OF_27B = 62
"""Layers of the only size that divides scores by the root of a width that is not its heads'."""


def _settings(metadata: Metadata) -> dict[str, Any]:
    heads, hidden = metadata.number("attention.head_count"), metadata.number("embedding_length")
    layers, window = metadata.number("block_count"), metadata.number("attention.sliding_window", 0)
    width = metadata.number("attention.key_length", 256)
    return {
        "layer_types": sliding_layers(metadata, 6) if window else ["full_attention"] * layers,
        "sliding_window": window or None,
        "query_pre_attn_scalar": hidden // heads if layers == _LAYERS_OF_27B else width,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


# --- mlx --------------------------------------------------------------------------------------------------------------


def _interval(config: Config) -> int:
    """The layers from one with full attention to the next, as mlx-lm counts them; 0 if they are not alike."""
    kinds = _KINDS(config, whole_number(config, "num_hidden_layers"))
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    rule = full_every("", every)
    return every if every and [rule(config, layer) for layer in range(len(kinds))] == kinds else 0


def _irregular(config: Config) -> str | None:
    return None if _interval(config) else f"layer_types {config.get('layer_types')!r}"


def _translate(config: Config) -> dict[str, Any]:
    return {
        "rope_local_base_freq": _rope(config, "sliding_attention")["rope_theta"],
        "sliding_window_pattern": _interval(config),
    }


FAMILIES = (
    Family(
        "gemma3_text",
        whole="gemma3",
        # The published files of 4B, 12B and 27B leave out all that transformers assumes.
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
        },
        decoder=DecoderRecord(
            norms="around",
            offset_norms=True,
            layer_kind=_KIND,
            head_kinds=_KINDS,
            kind_rope=_rope,
            windows=kind_windows(_KINDS),
            head_norm="per-head",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            embedding_scale=lambda config: whole_number(config, "hidden_size") ** 0.5,
            score_scale=lambda config, width: positive_number(config, "query_pre_attn_scalar") ** -0.5,
            logits_cap="final_logit_softcapping",
            activation_setting="hidden_activation",
        ),
        gguf=GgufRecord(
            "gemma3",
            "Gemma3ForCausalLM",
            settings=_settings,
            sliding_rope=lambda metadata: {
                "rope_type": "default",
                "rope_theta": metadata.real("rope.freq_base_swa", 10_000.0),
            },
            changes=without_ones,
        ),
        mlx=MlxRecord(
            "gemma3_text",
            rope_types=SCALED_ROPE,
            windowed=True,
            honours={
                "hidden_activation": ("gelu_pytorch_tanh",),
                "attention_bias": (False,),
                "final_logit_softcapping": (None,),
                "attn_logit_softcapping": (None,),
                "use_bidirectional_attention": (False, None),
            },
            checks=(_irregular,),
            translate=_translate,
        ),
        tokenizer_class="GemmaTokenizer",
    ),
)
