"""GGUF files of Qwen 3.5's kind (qwen35, qwen35moe and qwen3next), three of four layers of which are gated delta-nets.

llama.cpp stores some tensors otherwise than the checkpoint: norms with one added, decays as what they are used as, and
value heads in tiles (first the first head of every key head, then the second of every key head, and so on) where the
checkpoint has them grouped by key head. Qwen3-Next's value heads are stored as they are, but its queries, keys, values
and gates, which its checkpoint has by key head in one tensor, are in two, the gates in the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from engine.errors import ModelError, shown
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.architectures.gguf_parts import rotated_part
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.model_files import Change, Order


def settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is missing or
    impossible, or does not fit the others."""
    layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    value_heads, key_heads = metadata.number("ssm.time_step_rank"), metadata.number("ssm.group_count")
    values = metadata.number("ssm.inner_size")
    if value_heads % key_heads or values % value_heads:
        raise ModelError(
            f"{metadata.file.path} is damaged: its delta-nets have {value_heads} value heads of {values} values in all "
            f"over {key_heads} key heads, which do not fit together; download it again."
        )
    sections = metadata.get("rope.dimension_sections", [])
    if not isinstance(sections, list):
        raise ModelError(
            f"{metadata.file.path} is damaged: its rope.dimension_sections is {shown(sections)}, not a list of "
            "numbers; download it again."
        )
    return {
        "num_hidden_layers": layers,
        "layer_types": _layer_types(metadata, layers),
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.number("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": values // value_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.real("rope.freq_base", 10000.0),
            "partial_rotary_factor": rotated_part(metadata),
            # Files pad the sections with zeros to four.
            "mrope_section": [size for size in sections if isinstance(size, int) and size > 0],
            "mrope_interleaved": True,
        },
    }


def _layer_types(metadata: Metadata, layers: int) -> list[str]:
    interval = metadata.number("full_attention_interval", 4)
    recurrent = metadata.get("attention.recurrent_layers")
    if not isinstance(recurrent, list) or len(recurrent) < layers:
        recurrent = [(layer + 1) % interval for layer in range(layers)]
    return ["linear_attention" if each else "full_attention" for each in recurrent[:layers]]


def next_settings(metadata: Metadata) -> dict[str, Any]:
    """The settings of Qwen3-Next, which knows no pictures; see :func:`expert_settings`."""
    found = expert_settings(metadata)
    rope = {key: value for key, value in found["rope_parameters"].items() if not key.startswith("mrope")}
    return {
        **found,
        "rope_parameters": rope,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def expert_settings(metadata: Metadata) -> dict[str, Any]:
    """The settings of a model with experts; see :func:`settings`."""
    return {
        **settings(metadata),
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
    }


def layer_shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, prefix: str) -> Iterator[NamedTensor]:
    """The tensors of a layer's delta-net, norms of the layer left out."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    channels, values = _channels(config)
    yield from _named(
        here,
        prefix,
        ("attn_qkv.weight", "in_proj_qkv.weight", (channels, hidden)),
        ("attn_gate.weight", "in_proj_z.weight", (values, hidden)),
        ("ssm_alpha.weight", "in_proj_a.weight", (heads, hidden)),
        ("ssm_beta.weight", "in_proj_b.weight", (heads, hidden)),
    )
    yield from _common_shapes(config, here, prefix)


def next_layer_shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, prefix: str) -> Iterator[NamedTensor]:
    """The tensors of a layer of Qwen3-Next. Old files store its large projection as the checkpoint does."""
    hidden = config["hidden_size"]
    channels, values = _channels(config)
    if here + "ssm_in.weight" in gguf.tensors:
        yield from _named(here, prefix, ("ssm_in.weight", "in_proj_qkvz.weight", (channels + values, hidden)))
    else:
        yield from _named(
            here,
            prefix,
            ("attn_qkv.weight", "in_proj_qkvz.qkv.weight", (channels, hidden)),
            ("attn_gate.weight", "in_proj_qkvz.z.weight", (values, hidden)),
        )
    yield from _named(
        here, prefix, ("ssm_ba.weight", "in_proj_ba.weight", (2 * config["linear_num_value_heads"], hidden))
    )
    yield from _common_shapes(config, here, prefix)


def _channels(config: Mapping[str, Any]) -> tuple[int, int]:
    """Widths of the convolution and of the values."""
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values, values


def _common_shapes(config: Mapping[str, Any], here: str, prefix: str) -> Iterator[NamedTensor]:
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    yield from _named(
        here,
        prefix,
        ("ssm_norm.weight", "norm.weight", (width,)),
        ("ssm_out.weight", "out_proj.weight", (config["hidden_size"], heads * width)),
        ("ssm_a", "A_log", (heads,)),
        ("ssm_dt.bias", "dt_bias", (heads,)),
    )
    channels, kernel = _channels(config)[0], config["linear_conv_kernel_dim"]
    name = prefix + "linear_attn.conv1d.weight"
    yield NamedTensor(here + "ssm_conv1d.weight", name, (channels, 1, kernel), (channels, kernel))


def _named(here: str, there: str, *tensors: tuple[str, str, tuple[int, ...]]) -> Iterator[NamedTensor]:
    for source, name, shape in tensors:
        yield NamedTensor.whole(here + source, f"{there}linear_attn.{name}", shape)


def next_changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """What undoes llama.cpp's storage of Qwen3-Next, by the checkpoint's name of the tensor."""
    less_one = Change(subtracted=1.0)
    changes = {"model.norm.weight": less_one}
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}."
        changes |= {f"{prefix}{norm}.weight": less_one for norm in ("input_layernorm", "post_attention_layernorm")}
        if kind == "full_attention":
            changes |= {f"{prefix}self_attn.{norm}.weight": less_one for norm in ("q_norm", "k_norm")}
        else:
            changes[prefix + "linear_attn.A_log"] = Change(log_of=-1)
    return changes


def changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """The changes for Qwen 3.5: those of :func:`next_changes`, and value heads in another order."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = _grouped(config["linear_num_key_heads"], config["linear_num_value_heads"], 1)
    values = _grouped(config["linear_num_key_heads"], config["linear_num_value_heads"], config["linear_value_head_dim"])
    joined = np.concatenate([np.arange(2 * keys), 2 * keys + values])
    result = next_changes(config)
    for layer, kind in enumerate(config["layer_types"]):
        if kind == "full_attention":
            continue
        linear = f"model.layers.{layer}.linear_attn."
        result |= {
            linear + "in_proj_qkv.weight": Change(rows=joined),
            linear + "conv1d.weight": Change(rows=joined),
            linear + "in_proj_z.weight": Change(rows=values),
            linear + "in_proj_a.weight": Change(rows=heads),
            linear + "in_proj_b.weight": Change(rows=heads),
            linear + "dt_bias": Change(rows=heads),
            linear + "A_log": Change(rows=heads, log_of=-1),
            linear + "out_proj.weight": Change(columns=values),
        }
    return result


def _grouped(key_heads: int, value_heads: int, width: int) -> Order:
    """The places in tiles of what the checkpoint has grouped by key head, ``width`` numbers for each value head."""
    tiles = np.arange(value_heads * width, dtype=np.int64).reshape(value_heads // key_heads, key_heads, width)
    return tiles.swapaxes(0, 1).reshape(-1)
