"""Parts that the records of several families share about GGUF files: settings of experts, orders of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, shown
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.model_files import Change, Order


def experts(count_key: str) -> Callable[[Metadata], dict[str, Any]]:
    """The number of experts, which the setting ``count_key`` is, and of those of a token."""

    def settings(metadata: Metadata) -> dict[str, Any]:
        return {
            count_key: metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
        }

    return settings


def qwen_experts(metadata: Metadata, normalised: bool = True) -> dict[str, Any]:
    """Settings of Qwen's experts. ``normalised``: whether their weights are divided by their sum if the file does not
    say it."""
    return {
        **experts("num_experts")(metadata),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        # The file may say otherwise than its architecture does.
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", normalised)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def grouped_experts(metadata: Metadata, normalised: bool) -> dict[str, Any]:
    """Settings of DeepSeek's experts, which are in groups, after layers without experts."""
    return {
        **experts("n_routed_experts")(metadata),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "n_shared_experts": metadata.number("expert_shared_count"),
        "routed_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", normalised)),
        "n_group": metadata.number("expert_group_count", 1),
        "topk_group": metadata.number("expert_group_used_count", 1),
        "first_k_dense_replace": metadata.number("leading_dense_block_count", 0),
    }


def rotated_part(metadata: Metadata) -> float:
    """Which part of each head is rotated. Raises ModelError if the file says something impossible of heads."""
    width = metadata.head_width()
    return metadata.number("rope.dimension_count", width) / width


def llama3_parameters(
    gguf: GgufFile, theta: float, head_size: int, original: int, high: float
) -> dict[str, Any] | None:
    """The settings of Llama 3's scaling that give the divisors of frequencies in the file, with the base ``theta``, a
    text of ``original`` tokens and ``high`` as the factor of high frequencies; None if they give others."""
    divisors = gguf.floats("rope_freqs.weight").reshape(-1).astype(np.float64)
    # A file may claim heads of any width, which are not to take memory.
    if divisors.shape != (-(-head_size // 2),):
        return None
    parameters: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    return parameters if np.allclose(llama3_divisors(parameters, head_size), divisors, rtol=1e-4) else None


def llama3_divisors(parameters: Mapping[str, Any], head_size: int) -> NDArray[np.float64]:
    """Divisors of the rotary frequencies [head_size / 2] under Llama 3's scaling."""
    frequency = parameters["rope_theta"] ** -(np.arange(0, head_size, 2) / head_size)
    turns = parameters["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    blend = np.where(turns > low, 1.0, 0.0) if high == low else np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / factor + blend), dtype=np.float64)


def network_kinds(metadata: Metadata, layers: int) -> list[str]:
    """Whether each of the first ``layers`` layers has experts: ``mlp_layer_types`` of ``config.json``."""
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.file.tensors for layer in range(layers)]
    return ["sparse" if one else "dense" for one in routed]


def limits(metadata: Metadata, key: str, layers: int) -> Any:
    """What the file says of the limits within networks or experts: a number for each of the first ``layers`` layers, or
    None."""
    stated = metadata.get(key)
    if isinstance(stated, list):
        return stated[:layers]
    return None if stated is None else [stated] * layers


def one_limit(metadata: Metadata, layers: int) -> float:
    """The limit within networks and experts of all of the first ``layers`` layers. Raises ModelError if there is none,
    or several."""
    networks = limits(metadata, "swiglu_clamp_exp", layers) or []
    stated = {*networks, *(limits(metadata, "swiglu_clamp_shexp", layers) or networks)}
    if len(stated) != 1 or not all(isinstance(limit, float) and 0 < limit < math.inf for limit in stated):
        raise ModelError(
            f"{metadata.file.path} limits networks by {shown(sorted(stated, key=str))}, and one limit of all layers "
            "runs; use another file of this model."
        )
    return float(stated.pop())


def stream_settings(metadata: Metadata) -> dict[str, Any]:
    """Settings of residual streams that doubly stochastic matrices mix. Raises ModelError for a number that is missing
    or impossible."""
    return {
        "hc_mult": metadata.number("hyper_connection.count"),
        "hc_sinkhorn_iters": metadata.number("hyper_connection.sinkhorn_iterations"),
        "hc_eps": metadata.short_real("hyper_connection.epsilon", 1e-6),
    }


def stream_tensors(config: Mapping[str, Any], template: str) -> Iterator[NamedTensor]:
    """The tensors that mix these streams before and after attention and network of each layer. ``template``: their name
    within a layer, with ``{}`` for the part (attn or ffn) and for what it is (fn, base or scale)."""
    count, hidden = config["hc_mult"], config["hidden_size"]
    mixes = (2 + count) * count
    for layer in range(config["num_hidden_layers"]):
        for part in ("attn", "ffn"):
            for name, shape in (("fn", (mixes, count * hidden)), ("base", (mixes,)), ("scale", (3,))):
                target = f"model.layers.{layer}.{template.format(part, name)}"
                yield NamedTensor.whole(f"blk.{layer}.hc_{part}_{name}.weight", target, shape)


def sliding_layers(metadata: Metadata, interval: int) -> list[str]:
    """The kind of each layer: with a sliding window as the file says, or else all but every ``interval``-th."""
    layers, slides = metadata.number("block_count"), metadata.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        interval = metadata.number("attention.sliding_window_pattern", interval)
        slides = [bool((layer + 1) % interval) for layer in range(layers)]
    return ["sliding_attention" if one else "full_attention" for one in slides[:layers]]


def without_ones(config: Mapping[str, Any]) -> dict[str, Change]:
    """What takes the one from norms to which llama.cpp's converter has added it, by the name of a checkpoint's
    tensor."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    each = [f"{name}.weight" for name in (*names, "self_attn.q_norm", "self_attn.k_norm")]
    layers = [f"model.layers.{layer}.{name}" for layer in range(config["num_hidden_layers"]) for name in each]
    return dict.fromkeys(["model.norm.weight", *layers], Change(subtracted=1.0))


def paired_changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """What brings queries and keys from llama.cpp's order into transformers', by the name of a checkpoint's tensor."""
    size = config["head_dim"]
    changes: dict[str, Change] = {}
    for short, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
        change = Change(rows=_halves(heads, size))
        for layer in range(config["num_hidden_layers"]):
            for kind in ("weight", "bias"):
                changes[f"model.layers.{layer}.self_attn.{short}_proj.{kind}"] = change
    return changes


def _halves(heads: int, size: int) -> Order:
    """The places of rows whose pairs lie side by side, in transformers' order: the values of a pair are half a head of
    ``size`` apart."""
    pairs = np.arange(heads * size, dtype=np.int64).reshape(heads, size // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
