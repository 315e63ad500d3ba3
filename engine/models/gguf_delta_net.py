"""GGUF files of Qwen 3.5's kind (qwen35 and qwen35moe), three of four layers of which are gated delta-nets.

llama.cpp stores some tensors otherwise than the checkpoint: norms with one added, decays as what they are used as, and
value heads in tiles (first the first head of every key head, then the second of every key head, and so on) where the
checkpoint has them grouped by key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models.files import Change, Order
from engine.models.gguf_file import GgufFile
from engine.models.gguf_metadata import Metadata, Shapes


def settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is missing or
    impossible."""
    layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    interval = metadata.number("full_attention_interval", 4)
    value_heads, head_size = metadata.number("ssm.time_step_rank"), metadata.number("attention.key_length")
    sections = metadata.get("rope.dimension_sections", [])
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)],
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.number("ssm.state_size"),
        "linear_num_key_heads": metadata.number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": metadata.number("ssm.inner_size") // value_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.real("rope.freq_base", 10000.0),
            "partial_rotary_factor": metadata.number("rope.dimension_count", head_size) / head_size,
            # Files pad the sections with zeros to four.
            "mrope_section": [size for size in sections if isinstance(size, int) and size > 0],
            "mrope_interleaved": True,
        },
    }


def expert_settings(metadata: Metadata) -> dict[str, Any]:
    """As :func:`settings`, of a model with experts."""
    return {
        **settings(metadata),
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
    }


def layer_shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, there: str) -> Shapes:
    """The tensors of a layer's delta-net, norms of the layer left out."""
    hidden, kernel = config["hidden_size"], config["linear_conv_kernel_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values, channels = heads * width, 2 * keys + heads * width
    prefix = there + "linear_attn."
    for source, name, shape in (
        ("attn_qkv.weight", "in_proj_qkv.weight", (channels, hidden)),
        ("attn_gate.weight", "in_proj_z.weight", (values, hidden)),
        ("ssm_alpha.weight", "in_proj_a.weight", (heads, hidden)),
        ("ssm_beta.weight", "in_proj_b.weight", (heads, hidden)),
        ("ssm_norm.weight", "norm.weight", (width,)),
        ("ssm_out.weight", "out_proj.weight", (hidden, values)),
        ("ssm_a", "A_log", (heads,)),
        ("ssm_dt.bias", "dt_bias", (heads,)),
    ):
        yield here + source, prefix + name, shape, shape
    yield here + "ssm_conv1d.weight", prefix + "conv1d.weight", (channels, kernel), (channels, 1, kernel)


def changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """What undoes llama.cpp's storage, by the checkpoint's name of the tensor."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = _grouped(config["linear_num_key_heads"], config["linear_num_value_heads"], 1)
    values = _grouped(config["linear_num_key_heads"], config["linear_num_value_heads"], config["linear_value_head_dim"])
    joined = np.concatenate([np.arange(2 * keys), 2 * keys + values])
    less_one = Change(subtracted=1.0)
    found = {"model.norm.weight": less_one}
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}{norm}.weight": less_one for norm in ("input_layernorm", "post_attention_layernorm")}
        if kind == "full_attention":
            found |= {f"{prefix}self_attn.{norm}.weight": less_one for norm in ("q_norm", "k_norm")}
            continue
        linear = prefix + "linear_attn."
        found |= {
            linear + "in_proj_qkv.weight": Change(rows=joined),
            linear + "conv1d.weight": Change(rows=joined),
            linear + "in_proj_z.weight": Change(rows=values),
            linear + "in_proj_a.weight": Change(rows=heads),
            linear + "in_proj_b.weight": Change(rows=heads),
            linear + "dt_bias": Change(rows=heads),
            linear + "A_log": Change(rows=heads, log_of_negative=True),
            linear + "out_proj.weight": Change(columns=values),
        }
    return found


def _grouped(key_heads: int, value_heads: int, width: int) -> Order:
    """The places in tiles of what the checkpoint has grouped by key head, ``width`` numbers for each value head."""
    tiles = np.arange(value_heads * width, dtype=np.int64).reshape(value_heads // key_heads, key_heads, width)
    return tiles.swapaxes(0, 1).reshape(-1)
