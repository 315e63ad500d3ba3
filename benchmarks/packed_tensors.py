"""The tensors of a packed GGUF file and their types, from a model's configuration. Pure.

A layer is composed of what its configuration says: attention, a delta-net or a convolution, a feed-forward network,
routed and shared experts, and norms. Every part gives names and shapes; the types are chosen in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.packed_blocks import block_of
from engine.models.architectures.families import FAMILIES, ExpertLayers, expert_shape

Mix = Literal["Q4_K_M", "Q8_0", "MXFP4", "Q3_K", "Q2_K", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"]
"""The types of a file, as publishers name them; those of two and three bits are what experts have in a file that is
otherwise as Q4_K_M."""
Config = Mapping[str, Any]
Parts = Iterator[tuple[str, tuple[int, ...]]]
"""(name within the layer, shape)."""


@dataclass(frozen=True)
class PackedFamily:
    """What distinguishes the files of a family beyond its configuration."""

    architecture: str
    """llama.cpp's name."""
    real_layers: int = 0
    """Layers of the model that the shape stands for, if a layer's types are those of the layer as far down in its file;
    0: the types are those that the quantiser gives to a model of as many layers as are written."""
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    """Norms of a layer's width."""
    final_norm: str = "output_norm"
    head_norms: bool = False
    """Whether queries and keys have a norm of a head's width."""
    fused_experts: bool = False
    """Whether gate and up of the experts are one tensor."""
    split: str = ""
    """The rule by which texts are split, for a family that is told from others by it."""


_AFTER = ("attn_norm", "post_attention_norm")
_AROUND = ("ffn_norm", "pre_ffw_norm_2", "post_ffw_norm", "post_ffw_norm_1", "post_ffw_norm_2")

PACKED_FAMILIES: Mapping[str, PackedFamily] = {
    "mixtral": PackedFamily("llama", 32),
    "qwen3_moe": PackedFamily("qwen3moe", 48, head_norms=True),
    "llama": PackedFamily("llama", 16),
    "qwen3_5_moe_text": PackedFamily("qwen35moe", 40, _AFTER, head_norms=True),
    "glm4_moe_lite": PackedFamily("deepseek2", split="glm4"),
    "qwen3_next": PackedFamily("qwen3next", norms=_AFTER, head_norms=True),
    "gemma4_text": PackedFamily("gemma4", norms=(*_AFTER, *_AROUND), head_norms=True, fused_experts=True),
    "lfm2_moe": PackedFamily("lfm2moe", final_norm="token_embd_norm", head_norms=True),
    "glm4_moe": PackedFamily("glm4moe", norms=_AFTER, split="glm4"),
}
"""By the family's name in transformers."""

_FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What llama.cpp's quantiser takes for rows that are not whole blocks."""
_UNPACKED = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
"""Matrices that are kept in float32."""
_COUNTED = ("attn_v", "attn_qkv")
"""Delicate matrices that the quantiser counts by themselves; for the others it takes the number of the layer."""


@dataclass(frozen=True)
class PackedTensor:
    """``shape`` has the outermost dimension first; ``format`` is ggml's name."""

    name: str
    shape: tuple[int, ...]
    format: str

    @property
    def nbytes(self) -> int:
        numbers, size = block_of(self.format)
        return int(np.prod(self.shape)) // numbers * size


def packed_tensors(config: Config, mix: Mix) -> Iterator[PackedTensor]:
    """The tensors of a model with this ``config.json``, of a family of :data:`PACKED_FAMILIES`."""
    family, layers = PACKED_FAMILIES[config["model_type"]], config["num_hidden_layers"]
    hidden, vocabulary = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    routed = expert_shape(config, FAMILIES[config["model_type"]])
    parts = [dict(_layer(config, family, routed, layer)) for layer in range(layers)]
    counted = [layer for layer in range(layers) if any(name in parts[layer] for name in _COUNTED)]
    yield PackedTensor("token_embd.weight", vocabulary, format_of("token_embd", vocabulary, mix, False, config))
    for layer in range(layers):
        for name, shape in parts[layer].items():
            if family.real_layers:
                # These files keep attn_qkv in four bits, as they were first measured.
                more = _in_more_bits(layer * family.real_layers // layers, family.real_layers) and name != "attn_qkv"
            elif name in _COUNTED:
                more = _in_more_bits(counted.index(layer), len(counted))
            else:
                more = _in_more_bits(layer, layers)
            whole = name if name.endswith((".bias", ".scale", "ssm_a")) else f"{name}.weight"
            yield PackedTensor(f"blk.{layer}.{whole}", shape, format_of(name, shape, mix, more, config))
    yield PackedTensor(f"{family.final_norm}.weight", (hidden,), "F32")
    if "global_head_dim" in config:
        yield PackedTensor("rope_freqs.weight", (config["global_head_dim"] // 2,), "F32")
    if not config["tie_word_embeddings"]:
        yield PackedTensor("output.weight", vocabulary, format_of("output", vocabulary, mix, False, config))


def _in_more_bits(number: int, count: int) -> bool:
    """Whether a file stores matrix ``number`` of ``count`` of the more delicate ones in more bits."""
    return number < count // 8 or number >= 7 * count // 8 or (number - count // 8) % 3 == 2


def format_of(name: str, shape: Sequence[int], mix: Mix, more: bool, config: Config) -> str:
    """The type of a tensor in a file of ``mix``, as llama.cpp's quantiser chooses it. ``more``: whether it is stored in
    more bits if it is of a delicate kind."""
    if len(shape) == 1 or name.startswith(_UNPACKED):
        return "F32"
    found = _unfitted(name, mix, more, config)
    return _FALLBACKS.get(found, found) if shape[-1] % block_of(found)[0] else found


def _unfitted(name: str, mix: Mix, more: bool, config: Config) -> str:
    if mix == "Q8_0":
        return "Q8_0"
    if mix == "MXFP4":
        return "MXFP4" if "_exps" in name else "Q8_0"
    if mix != "Q4_K_M" and "_exps" in name:
        return mix
    if name in ("output", "token_embd"):
        return "Q6_K" if name == "output" or config["tie_word_embeddings"] else "Q4_K"
    if name in ("attn_k", "attn_v") and config.get("num_local_experts") == 8:
        return "Q8_0"
    return "Q6_K" if more and (name in _COUNTED or name.startswith("ffn_down")) else "Q4_K"


def _layer(config: Config, family: PackedFamily, routed: ExpertLayers | None, layer: int) -> Parts:
    hidden = config["hidden_size"]
    sparse = routed if routed is not None and layer in routed.layers else None
    yield from _mixer(config, layer)
    if sparse is None or config.get("enable_moe_block"):
        # Gemma 4 has it beside its experts.
        yield from _feed_forward("", (), config["intermediate_size"], hidden)
    if sparse is not None:
        yield from _experts(sparse, family.fused_experts)
    for norm in family.norms:
        yield norm, (hidden,)
    if sparse is not None:
        yield from _shared_expert(config, sparse.ffn)
        yield "ffn_gate_inp", (sparse.count, hidden)
        yield from _router_vectors(config, sparse)
    if family.head_norms and layer_kind(config, layer) in ("full_attention", "sliding_attention"):
        width, _ = _heads(config, layer)
        yield "attn_q_norm", (width,)
        yield "attn_k_norm", (width,)


def layer_kind(config: Config, layer: int) -> str:
    """What mixes the tokens of a layer, as ``layer_types`` names it."""
    kind: str = config["layer_types"][layer] if "layer_types" in config else "full_attention"
    return kind


def _mixer(config: Config, layer: int) -> Parts:
    kind = layer_kind(config, layer)
    if kind == "linear_attention":
        return _delta_net(config)
    if kind == "conv":
        return _short_convolution(config)
    return _latent_attention(config) if "kv_lora_rank" in config else _attention(config, layer)


def _heads(config: Config, layer: int) -> tuple[int, int]:
    """Width of a layer's heads, and how many of them have keys and values."""
    if "global_head_dim" in config and layer_kind(config, layer) == "full_attention":
        return config["global_head_dim"], config["num_global_key_value_heads"]
    return head_width(config), config["num_key_value_heads"]


def head_width(config: Config) -> int:
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width


def _attention(config: Config, layer: int) -> Parts:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width, groups = _heads(config, layer)
    # Beside delta-nets, every query has a gate.
    rows = {"q": heads * width * (2 if "linear_num_key_heads" in config else 1), "k": groups * width}
    if not (config.get("attention_k_eq_v") and layer_kind(config, layer) == "full_attention"):
        rows["v"] = groups * width
    for short, count in rows.items():
        yield f"attn_{short}", (count, hidden)
    yield "attn_output", (hidden, heads * width)
    if config.get("attention_bias"):
        for short, count in rows.items():
            yield f"attn_{short}.bias", (count,)


def _latent_attention(config: Config) -> Parts:
    hidden, heads, latents = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotated, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield "attn_q_a", (config["q_lora_rank"], hidden)
    yield "attn_q_a_norm", (config["q_lora_rank"],)
    yield "attn_q_b", (heads * (plain + rotated), config["q_lora_rank"])
    yield "attn_kv_a_mqa", (latents + rotated, hidden)
    yield "attn_kv_a_norm", (latents,)
    # A matrix for each head. That of the keys is transposed, so that queries are multiplied by it.
    yield "attn_k_b", (heads, latents, plain)
    yield "attn_v_b", (heads, values, latents)
    yield "attn_output", (hidden, heads * values)


def _delta_net(config: Config) -> Parts:
    hidden, heads, width = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * width
    yield "ssm_conv1d", (2 * keys + values, config["linear_conv_kernel_dim"])
    yield "ssm_norm", (width,)
    yield "ssm_a", (heads,)
    yield "ssm_dt.bias", (heads,)
    yield "attn_qkv", (2 * keys + values, hidden)
    yield "attn_gate", (values, hidden)
    yield "ssm_out", (hidden, values)
    if config["model_type"] == "qwen3_next":
        yield "ssm_ba", (2 * heads, hidden)
    else:
        yield "ssm_alpha", (heads, hidden)
        yield "ssm_beta", (heads, hidden)


def _short_convolution(config: Config) -> Parts:
    hidden = config["hidden_size"]
    yield "shortconv.conv", (hidden, config["conv_L_cache"])
    yield "shortconv.in_proj", (3 * hidden, hidden)
    yield "shortconv.out_proj", (hidden, hidden)


def _feed_forward(suffix: str, many: tuple[int, ...], ffn: int, hidden: int) -> Parts:
    yield f"ffn_gate{suffix}", (*many, ffn, hidden)
    yield f"ffn_up{suffix}", (*many, ffn, hidden)
    yield f"ffn_down{suffix}", (*many, hidden, ffn)


def _experts(sparse: ExpertLayers, fused: bool) -> Parts:
    if fused:
        yield "ffn_gate_up_exps", (sparse.count, 2 * sparse.ffn, sparse.hidden)
        yield "ffn_down_exps", (sparse.count, sparse.hidden, sparse.ffn)
    else:
        yield from _feed_forward("_exps", (sparse.count,), sparse.ffn, sparse.hidden)


def _shared_expert(config: Config, ffn: int) -> Parts:
    hidden = config["hidden_size"]
    if gated := config.get("shared_expert_intermediate_size"):
        yield "ffn_gate_inp_shexp", (hidden,)
        yield from _feed_forward("_shexp", (), gated, hidden)
    if shared := config.get("n_shared_experts"):
        yield from _feed_forward("_shexp", (), ffn * shared, hidden)


def _router_vectors(config: Config, sparse: ExpertLayers) -> Parts:
    if "n_routed_experts" in config or config.get("use_expert_bias"):
        yield "exp_probs_b.bias", (sparse.count,)
    if config.get("enable_moe_block"):
        yield "ffn_gate_inp.scale", (sparse.hidden,)
        yield "ffn_down_exps.scale", (sparse.count,)
        yield "layer_output_scale", (1,)
