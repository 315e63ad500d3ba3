"""GGUF files of LFM2's kind with experts (lfm2moe), most layers of which are short convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import ModelError, shown
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.formats.gguf_file import GgufFile

NAMES = {
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


def settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is missing or
    impossible."""
    layers = metadata.number("block_count")
    heads = metadata.get("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != layers or not all(type(count) is int for count in heads):
        raise ModelError(
            f"The GGUF gives {shown(heads)} for the heads of keys, which must be a number for each of {layers} layers; "
            "download it again."
        )
    if metadata.get("expert_gating_func", 2) != 2:
        raise ModelError("The GGUF's router is not one of sigmoids, as every lfm2moe model's is; use another file.")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": metadata.short_real("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": metadata.number("shortconv.l_cache"),
        "conv_bias": False,
        "num_dense_layers": metadata.number("leading_dense_block_count", 0),
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "use_expert_bias": True,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "routed_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
    }


def layer_shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, there: str) -> Iterator[NamedTensor]:
    """The tensors of a layer's convolution, norms of the layer left out."""
    hidden, kernel = config["hidden_size"], config["conv_L_cache"]
    stored, prefix = here + "shortconv.", there + "conv."
    for name, shape in (("in_proj.weight", (3 * hidden, hidden)), ("out_proj.weight", (hidden, hidden))):
        yield NamedTensor.whole(stored + name, prefix + name, shape)
    yield NamedTensor(stored + "conv.weight", prefix + "conv.weight", (hidden, 1, kernel), (hidden, kernel))
