"""The families that the native trunk runs: a table of what distinguishes each.

To add a family, add a row and its tiny model to the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.errors import ModelError, damaged, shown
from engine.models.architectures import gguf_short_convolution

HeadNorm = Literal["none", "per-head", "whole"]
"""Norms of queries and keys: none; each head by itself (qwen3); the whole projection (olmoe)."""
Scoring = Literal["softmax", "sigmoid"]
"""What a router makes of the experts' logits."""
SharedExpert = Literal["none", "gated", "plain"]
"""An expert that runs for all tokens: none; scaled by a gate of its own (qwen2_moe); as it is (deepseek_v3)."""


def _no_window(config: Mapping[str, Any], layers: int) -> list[int]:
    return [0] * layers


def _one_window(default: int | None) -> Callable[[Mapping[str, Any], int], list[int]]:
    """Every layer has the window of the configuration (mistral, mixtral)."""

    def windows(config: Mapping[str, Any], layers: int) -> list[int]:
        return [_window(config.get("sliding_window", default))] * layers

    return windows


def _switched_window(config: Mapping[str, Any], layers: int) -> list[int]:
    """Every layer, if ``use_sliding_window`` (qwen3_moe)."""
    used = config.get("use_sliding_window", False)
    return [_window(config.get("sliding_window", 4096)) if used else 0] * layers


def _late_windows(config: Mapping[str, Any], layers: int) -> list[int]:
    """Layers from ``max_window_layers`` on, if ``use_sliding_window``, or as ``layer_types`` says (qwen2, qwen3)."""
    used = bool(config.get("use_sliding_window", False)) and config.get("sliding_window", 4096) is not None
    first = config.get("max_window_layers", 28)
    return _by_type(config, [used and layer >= first for layer in range(layers)], used, 4096)


def _early_even_windows(config: Mapping[str, Any], layers: int) -> list[int]:
    """Even layers before ``max_window_layers``, if ``use_sliding_window`` (qwen2_moe)."""
    used = bool(config.get("use_sliding_window", False))
    last = config.get("max_window_layers", 28)
    return _by_type(config, [used and layer % 2 == 0 and layer < last for layer in range(layers)], used, 4096)


def _even_windows(config: Mapping[str, Any], layers: int) -> list[int]:
    """Even layers, or as ``layer_types`` says (gpt_oss)."""
    used = config.get("sliding_window", 128) is not None
    return _by_type(config, [layer % 2 == 0 for layer in range(layers)], used, 128)


def check_kinds(kinds: Any, layers: int, known: tuple[str, ...]) -> list[str]:
    """``kinds``, as ``layer_types`` gives them. Raises ModelError if that is no list of so many ``known`` kinds of
    layers."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise damaged(
            f"config.json gives {shown(kinds)} for layer_types, which must name one kind for each of the {layers} "
            "layers"
        )
    unknown = next((kind for kind in kinds if kind not in known), None)
    if unknown is not None:
        raise damaged(f"config.json names the unknown kind of layer {shown(unknown)}")
    return kinds


def _sliding_windows(config: Mapping[str, Any], layers: int) -> list[int]:
    """As ``layer_types`` says (gemma4)."""
    return _by_type(config, [False] * layers, True, 512)


def _by_type(config: Mapping[str, Any], default: list[bool], used: bool, size: int) -> list[int]:
    kinds = config.get("layer_types")
    if kinds is not None:
        check_kinds(kinds, len(default), ("full_attention", "sliding_attention"))
        default = [kind == "sliding_attention" for kind in kinds]
    if any(default) and not used:
        raise damaged("config.json asks for sliding windows and gives no size for them")
    return [_window(config.get("sliding_window", size)) if slides else 0 for slides in default]


def _window(value: Any) -> int:
    if value is None or value == 0:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"config.json gives {shown(value)} for sliding_window, which must be a number of tokens.")
    return value


@dataclass(frozen=True)
class Traits:
    """What distinguishes one family. Names of tensors are those of a layer, without its prefix."""

    windows: Callable[[Mapping[str, Any], int], list[int]] = _no_window
    head_norm: HeadNorm = "none"
    head_norm_setting: str = ""
    """Setting that has to be true for ``head_norm``; empty: always."""
    qkv_bias: bool | str = False
    """A bias of queries, keys and values: never, always, or as this setting says."""
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    default_on: tuple[str, ...] = ()
    """Settings that transformers assumes to be true if ``config.json`` does not contain them."""
    sinks: bool = False
    """Whether every head has a logit besides those of the keys, which takes a share of the attention (gpt_oss)."""
    clamped: bool = False
    """Whether gate and up are clamped before they are multiplied (gpt_oss)."""
    default_width: int | None = None
    """Size of a head if ``config.json`` gives none and it is not hidden / heads."""
    default_key_value_heads: int | None = None
    """Number of key-value heads; None: as many as heads."""
    default_epsilon: float = 1e-6
    default_base: float = 10_000.0
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    default_top_k: int = 0
    routers: tuple[str, ...] = ()
    """Names that a checkpoint may use for the router; empty for a dense family."""
    router_bias: bool = False
    normalise: bool | str = False
    """Whether the chosen experts' weights are divided by their sum: never, always, or as this setting says."""
    default_normalise: bool = False
    """What that setting is if ``config.json`` does not contain it."""
    scoring: Scoring = "softmax"
    correction: str = ""
    """Name of what is added to the experts' scores where they are compared (deepseek_v3); empty: nothing."""
    correction_setting: str = ""
    """Setting that must not be false for it; empty: none."""
    groups: bool = False
    """Whether experts are in groups, of which only the best are used (deepseek_v3)."""
    scaled: bool = False
    """Whether the weights of chosen experts are multiplied by ``routed_scaling_factor``."""
    default_groups: int | None = 1
    """Number of groups if ``config.json`` gives none; None: it has to."""
    shared_expert: SharedExpert = "none"
    latents: bool = False
    """Whether attention is over latents (deepseek_v2)."""
    interleaving_setting: str = ""
    """Setting that is false if the rotated numbers of queries over latents are not in pairs; empty: they always are."""
    default_tied: bool = False
    """Whether the embedding is also the output head if ``config.json`` does not say so."""
    convolutions: bool = False
    """Whether most layers have a short convolution in place of attention (lfm2_moe)."""
    default_scale: float = 1.0
    """What that factor is if ``config.json`` does not contain it."""
    least_sum: float = 0.0
    """What is added to the sum by which weights are divided, as transformers does with scores that may all be 0."""
    sandwiched: bool = False
    """Whether layers are those of Gemma 4: with norms after each part, a feed-forward network beside the experts, and
    heads of two kinds."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of the usual names of tensors, and what they are in this family."""
    epsilon_setting: str = "rms_norm_eps"
    activation_setting: str = "hidden_act"
    clip: bool = False
    """``clip_qkv`` limits queries, keys and values (olmoe)."""
    multipliers: bool = False
    """granite's four numbers that scale embedding, attention, residual and logits."""
    delta_nets: bool = False
    """Whether most layers have a gated delta-net, the others attention with a gate for each query, and norms are stored
    as their difference from one (qwen3_5, qwen3_next)."""
    default_rotated: float | None = None
    """Share of each head that is rotated; None: all of it, and no other share is known."""


_QWEN35 = Traits(
    head_norm="per-head",
    delta_nets=True,
    default_rotated=0.25,
    default_width=256,
    default_key_value_heads=4,
)

_GROUPED = Traits(
    routers=("mlp.gate.weight",),
    scoring="sigmoid",
    correction="mlp.gate.e_score_correction_bias",
    groups=True,
    scaled=True,
    normalise="norm_topk_prob",
    default_normalise=True,
    least_sum=1e-20,
    shared_expert="plain",
    default_top_k=8,
)
"""Routers as those of DeepSeek V3."""

_LATENT = replace(_GROUPED, latents=True, interleaving_setting="rope_interleave")

TABLE: Mapping[str, Traits] = {
    "llama": Traits(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Traits(windows=_one_window(4096), default_key_value_heads=8),
    "qwen2": Traits(windows=_late_windows, qkv_bias=True, default_key_value_heads=32),
    "qwen3": Traits(
        windows=_late_windows,
        head_norm="per-head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        default_width=128,
        default_key_value_heads=32,
    ),
    "mixtral": Traits(
        windows=_one_window(None),
        routers=("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        normalise=True,
        default_key_value_heads=8,
        default_epsilon=1e-5,
        default_base=1_000_000.0,
        default_top_k=2,
    ),
    "qwen2_moe": Traits(
        windows=_early_even_windows,
        routers=("mlp.gate.weight",),
        normalise="norm_topk_prob",
        qkv_bias="qkv_bias",
        default_on=("qkv_bias",),
        shared_expert="gated",
        default_key_value_heads=16,
        default_top_k=4,
    ),
    "qwen3_moe": Traits(
        windows=_switched_window,
        routers=("mlp.gate.weight",),
        normalise="norm_topk_prob",
        head_norm="per-head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        default_key_value_heads=4,
        default_top_k=8,
    ),
    "olmoe": Traits(
        routers=("mlp.gate.weight",),
        normalise="norm_topk_prob",
        head_norm="whole",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        default_epsilon=1e-5,
        default_top_k=8,
        clip=True,
    ),
    "granitemoe": Traits(
        routers=("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
        # A softmax over the chosen logits alone is the whole softmax, divided by the sum of the chosen.
        normalise=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        default_top_k=2,
        multipliers=True,
    ),
    "gpt_oss": Traits(
        windows=_even_windows,
        routers=("mlp.router.weight",),
        router_bias=True,
        normalise=True,  # as granitemoe
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        default_on=("attention_bias",),
        sinks=True,
        clamped=True,
        default_width=64,
        default_key_value_heads=8,
        default_epsilon=1e-5,
        default_base=150_000.0,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        default_top_k=4,
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": replace(
        _QWEN35,
        routers=("mlp.gate.weight",),
        normalise=True,
        shared_expert="gated",
        default_key_value_heads=2,
        default_top_k=8,
    ),
    "qwen3_next": replace(
        _QWEN35,
        routers=("mlp.gate.weight",),
        normalise="norm_topk_prob",
        default_normalise=True,
        shared_expert="gated",
        default_key_value_heads=2,
        default_top_k=10,
    ),
    "deepseek_v2": Traits(
        latents=True,
        routers=("mlp.gate.weight",),
        groups=True,
        scaled=True,
        shared_expert="plain",
    ),
    "deepseek_v3": replace(_LATENT, default_groups=None, default_scale=2.5),
    "glm4_moe_lite": replace(_LATENT, default_scale=1.8, default_epsilon=1e-5, default_top_k=4),
    "lfm2_moe": Traits(
        convolutions=True,
        default_tied=True,
        names=gguf_short_convolution.NAMES,
        head_norm="per-head",
        routers=("mlp.gate.weight",),
        scoring="sigmoid",
        correction="mlp.expert_bias",
        correction_setting="use_expert_bias",
        scaled=True,
        normalise="norm_topk_prob",
        default_normalise=True,
        least_sum=1e-6,
        default_key_value_heads=8,
        default_epsilon=1e-5,
        default_base=1_000_000.0,
        default_top_k=4,
        epsilon_setting="norm_eps",
    ),
    "gemma4_text": Traits(
        sandwiched=True,
        default_tied=True,
        activation_setting="hidden_activation",
        default_width=256,
        default_key_value_heads=4,
        windows=_sliding_windows,
        head_norm="per-head",
        routers=("router.proj.weight",),
        normalise=True,
        default_top_k=8,
    ),
    "glm4_moe": replace(
        _GROUPED,
        head_norm="per-head",
        head_norm_setting="use_qk_norm",
        qkv_bias="attention_bias",
        default_key_value_heads=8,
        default_epsilon=1e-5,
        default_rotated=0.5,
    ),
}
"""transformers' ``model_type`` -> traits."""
