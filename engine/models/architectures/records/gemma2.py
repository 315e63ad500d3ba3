"""Gemma 2: every second layer sees a window, and scores of attention have a limit."""

from __future__ import annotations

from typing import Any

from engine.models.architectures.config_values import positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import sliding_layers, without_ones
from engine.models.architectures.layer_rules import full_every, kind_windows, kinds_by
from engine.models.architectures.record import Config, DecoderRecord, Family, GgufRecord, MlxRecord

_KIND = full_every("", 2)
_LAYERS_OF_27B = 46
"""Layers of the only size that divides scores by the root of a width that is not its heads'."""


def _settings(metadata: Metadata) -> dict[str, Any]:
    heads, hidden = metadata.number("attention.head_count"), metadata.number("embedding_length")
    layers, width = metadata.number("block_count"), metadata.number("attention.key_length", 256)
    return {
        "layer_types": sliding_layers(metadata, 2),
        "sliding_window": metadata.number("attention.sliding_window", 4096),
        "query_pre_attn_scalar": hidden // heads if layers == _LAYERS_OF_27B else width,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0),
    }


def _without_limits(config: Config) -> str | None:
    """mlx-lm always divides by them."""
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return next((f"{name} None" for name in names if config.get(name) is None), None)


FAMILIES = (
    Family(
        "gemma2",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        decoder=DecoderRecord(
            norms="around",
            offset_norms=True,
            layer_kind=_KIND,
            windows=kind_windows(kinds_by(_KIND)),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            embedding_scale=lambda config: whole_number(config, "hidden_size") ** 0.5,
            score_scale=lambda config, width: positive_number(config, "query_pre_attn_scalar") ** -0.5,
            logits_cap="final_logit_softcapping",
            scores_cap="attn_logit_softcapping",
            activation_setting="hidden_activation",
        ),
        gguf=GgufRecord("gemma2", "Gemma2ForCausalLM", settings=_settings, changes=without_ones),
        mlx=MlxRecord(
            "gemma2",
            honours={
                "hidden_activation": ("gelu_pytorch_tanh",),
                "attention_bias": (False,),
                "tie_word_embeddings": (True,),
                "use_bidirectional_attention": (False, None),
            },
            checks=(_without_limits,),
        ),
        tokenizer_class="GemmaTokenizer",
    ),
)
