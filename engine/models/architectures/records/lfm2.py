"""LFM2, without and with experts, most layers of which are short convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelError, damaged, shown
from engine.models.architectures.config_values import number_of, positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.architectures.layer_rules import after_dense, layer_list
from engine.models.architectures.parts import GGUF, LAYER, fused, of_mlx, per_expert
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)
from engine.models.formats.gguf_file import GgufFile

_NAMES = {
    "model.norm.": "model.embedding_norm.",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    ".mlp.": ".feed_forward.",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
"""Parts of the usual names of a checkpoint, and what they are in this family."""


def _ffn(config: Config, layer: int) -> int:
    """Published settings give the width before two thirds of it are rounded up."""
    width = whole_number(config, "block_ff_dim", "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim"):
        return width
    width, step = int(2 * width / 3), whole_number(config, "block_multiple_of")
    wide = positive_number(config, "block_ffn_dim_multiplier") * width
    if math.isinf(wide):
        raise damaged(f"config.json gives {shown(config['block_ffn_dim_multiplier'])} for block_ffn_dim_multiplier")
    return -(-int(wide) // step) * step


def _kind(config: Config, layer: int) -> str:
    """Older files list the layers with attention."""
    full = layer_list(config, "full_attn_idxs")
    return "full_attention" if full is None or layer in full else "conv"


def _settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is missing or
    impossible."""
    heads = metadata.each_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": metadata.short_real("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": metadata.number("shortconv.l_cache"),
        "conv_bias": False,
    }


def _dense_settings(metadata: Metadata) -> dict[str, Any]:
    # The file has the width itself.
    return _settings(metadata) | {"block_auto_adjust_ff_dim": False}


def _moe_settings(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("expert_gating_func", 2) != 2:
        raise ModelError("The GGUF's router is not one of sigmoids, as every lfm2moe model's is; use another file.")
    return _settings(metadata) | {
        "num_dense_layers": metadata.number("leading_dense_block_count", 0),
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "use_expert_bias": True,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "routed_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
    }


def _layer_shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, there: str) -> Iterator[NamedTensor]:
    """The tensors of a layer's convolution, norms of the layer left out."""
    hidden, kernel = config["hidden_size"], config["conv_L_cache"]
    stored, prefix = here + "shortconv.", there + "conv."
    for name, shape in (("in_proj.weight", (3 * hidden, hidden)), ("out_proj.weight", (hidden, hidden))):
        yield NamedTensor.whole(stored + name, prefix + name, shape)
    yield NamedTensor(stored + "conv.weight", prefix + "conv.weight", (hidden, 1, kernel), (hidden, kernel))


DECODER = DecoderRecord(
    mixer="convolution",
    head_norm="per-head",
    rope_theta=1_000_000.0,
    epsilon_setting="norm_eps",
    names=_NAMES,
)
_DEFAULTS = {"num_key_value_heads": 8, "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_L_cache": 3}
LFM2 = Family(
    "lfm2",
    defaults=_DEFAULTS | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
    decoder=replace(DECODER, layer_kind=_kind, ffn=_ffn),
    gguf=GgufRecord(
        "lfm2",
        "Lfm2ForCausalLM",
        settings=_dense_settings,
        mixer=_layer_shapes,
        mixed_layers="conv",
        final_norm="token_embd_norm.weight",
    ),
    mlx=MlxRecord(
        "lfm2",
        nested_rotary=True,
        honours={"tie_word_embeddings": (True,)},
        translate=lambda config: {"block_dim": config["hidden_size"]},
    ),
)
LFM2_MOE = Family(
    "lfm2_moe",
    defaults=_DEFAULTS
    | {
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    decoder=DECODER,
    moe=MoeRecord(
        (
            per_expert(LAYER + "feed_forward.experts", "w1", "w3", "w2"),
            fused(LAYER + "feed_forward.experts."),
            of_mlx(LAYER + "feed_forward.switch_mlp"),
            *GGUF,
        ),
        RouterRecord(
            ("mlp.gate.weight",),
            scoring="sigmoid",
            normalise="norm_topk_prob",
            added_to_sum=1e-6,
            correction="mlp.expert_bias",
            correction_setting="use_expert_bias",
            scale=number_of("routed_scaling_factor"),
        ),
        layers=after_dense("num_dense_layers"),
        count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    gguf=GgufRecord(
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        settings=_moe_settings,
        mixer=_layer_shapes,
        mixed_layers="conv",
        final_norm="token_embd_norm.weight",
    ),
    mlx=MlxRecord(
        "lfm2_moe",
        block="feed_forward",
        route="last-of-corrected-sigmoids",
        nested_rotary=True,
        honours={"tie_word_embeddings": (True,)},
        stored_names=(
            (".feed_forward.gate_proj.", ".feed_forward.w1."),
            (".feed_forward.down_proj.", ".feed_forward.w2."),
            (".feed_forward.up_proj.", ".feed_forward.w3."),
        ),
    ),
)
FAMILIES = (LFM2, LFM2_MOE)
