"""Gemma 4 without pictures: layers with a sliding window and with full attention have heads of different sizes. With
experts (26B-A4B), every layer has a dense feed-forward network beside them. In E2B and E4B layers have embeddings of
their own, and the later ones attend to keys of earlier ones. The 12B is a family of its own without either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.errors import ModelError, shown
from engine.models.architectures.config_values import own_settings, whole_number
from engine.models.architectures.gguf_metadata import Metadata, tensor_of
from engine.models.architectures.layer_rules import named_kinds, named_windows, rope_by_kind, shared_keys
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

_UNTURNED = 1e20
"""Divisor of a rotary frequency from which on it stands for a value that is not rotated."""
_rope = rope_by_kind(
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    {"rope_type": "default", "rope_theta": 10_000.0},
)


# --- config.json ------------------------------------------------------------------------------------------------------


def _kind_settings(config: Config, kind: str) -> Config:
    """Layers with full attention have other heads."""
    if kind != "full_attention":
        return {}
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return {
        "head_dim": config.get("global_head_dim", 512),
        "num_key_value_heads": heads or config.get("num_key_value_heads"),
    }


def _ffn(config: Config, layer: int) -> int:
    """Networks of layers that attend to keys of others may be twice as wide."""
    width = whole_number(config, "intermediate_size")
    shares = layer >= whole_number(config, "num_hidden_layers") - whole_number(
        config, "num_kv_shared_layers", minimum=0
    )
    return 2 * width if shares and config.get("use_double_wide_mlp") else width


# --- mlx --------------------------------------------------------------------------------------------------------------


def _unknown_kinds(config: Config) -> str | None:
    """mlx-lm knows settings of its own for all layers with full attention, not for each of them."""
    own, known = own_settings(config) or {}, {"head_dim", "num_key_value_heads"}
    of_kind: dict[str, dict[str, Any]] = {"sliding_attention": {}}
    for layer, kind in enumerate(config.get("layer_types") or ()):
        settings = dict(own.get(layer, {}))
        if of_kind.setdefault(kind, settings) != settings or not known.issuperset(settings):
            return f"per_layer_config {settings!r} of layer {layer}"
    return None


def _translate(config: Config) -> dict[str, Any]:
    """transformers 5 writes what layers with full attention have of their own for each of them."""
    full = "full_attention"
    own = own_settings(config)
    layer = config["layer_types"].index(full) if full in config["layer_types"] else 0
    wide = {**config, **(_kind_settings(config, full) if own is None else own.get(layer, {}))}
    return {"global_head_dim": wide["head_dim"], "num_global_key_value_heads": wide["num_key_value_heads"]}


# --- GGUF files -------------------------------------------------------------------------------------------------------


def _settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is missing or
    impossible."""
    gguf, layers = metadata.file, metadata.number("block_count")
    shared = metadata.number("attention.shared_kv_layers", 0)
    widths = metadata.get("feed_forward_length")
    widths = widths if isinstance(widths, list) else [widths] * layers
    if shared >= layers or len(widths) < layers:
        raise ModelError(
            f"{gguf.path} is damaged: of its {layers} layers {shared} have keys of others, and {len(widths)} a width; "
            "download it again."
        )
    slides = metadata.get("attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) < layers or slides[layers - 1] != 0:
        raise ModelError(
            f"{gguf.path} is damaged: its sliding_window_pattern is {shown(slides)}, not one entry for each of "
            f"{layers} layers, the last without a window; download it again."
        )
    slides = slides[:layers]
    wide = metadata.number("attention.key_length")
    heads = metadata.get("attention.head_count_kv")
    counts = heads if isinstance(heads, list) else [heads] * layers
    if len(counts) < layers or not all(type(count) is int and count > 0 for count in counts):
        raise ModelError(f"{gguf.path} is damaged: its head_count_kv is {shown(heads)}; download it again.")
    full = slides.index(False)
    narrow = slides.index(True) if True in slides else full
    own_embeddings = metadata.number("embedding_length_per_layer_input", 0)
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": metadata.number("attention.sliding_window"),
        "head_dim": metadata.number("attention.key_length_swa"),
        "global_head_dim": wide,
        "num_key_value_heads": counts[narrow],
        "num_global_key_value_heads": counts[full],
        # Files leave the values of such layers out, as they are the keys.
        "attention_k_eq_v": not {f"blk.{full}.attn_v.weight", f"blk.{full}.attn_qkv.weight"} & gguf.tensors.keys(),
        "intermediate_size": widths[0],
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": own_embeddings,
        **({"vocab_size_per_layer_input": tensor_of(gguf, "token_embd.weight").rows} if own_embeddings else {}),
        "hidden_activation": "gelu_pytorch_tanh",
        "use_double_wide_mlp": widths[layers - 1] != widths[0],
        **_experts(metadata),
        "final_logit_softcapping": metadata.short_real("final_logit_softcapping", 30.0),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_part(gguf, wide),
                "rope_theta": metadata.real("rope.freq_base", 1_000_000.0),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.real("rope.freq_base_swa", 10_000.0),
            },
        },
    }


def _experts(metadata: Metadata) -> dict[str, Any]:
    if not metadata.get("expert_count"):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.number("expert_count"),
        "top_k_experts": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
    }


def _rotated_part(gguf: GgufFile, width: int) -> float:
    """Which part of a wide head is rotated: the other frequencies are divided by more than any number. Raises
    ModelError if a file divides them by anything else."""
    if "rope_freqs.weight" not in gguf.tensors:
        return 1.0
    divisors = gguf.floats("rope_freqs.weight").reshape(-1)
    turned = int(np.count_nonzero(divisors < _UNTURNED))
    if divisors.shape != (width // 2,) or not turned or not (divisors[:turned] == 1.0).all():
        raise ModelError(f"{gguf.path} scales its positions in a way that is not Gemma 4's; use another file.")
    return turned / divisors.size


DECODER = DecoderRecord(
    norms="around",
    layer_scale=True,
    own_input="hidden_size_per_layer_input",
    head_kinds=named_kinds,
    kind_rope=_rope,
    keys_are_values=lambda config, kind: kind == "full_attention" and bool(config.get("attention_k_eq_v")),
    keys_of=shared_keys,
    windows=named_windows,
    head_norm="per-head",
    value_norm=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    ffn=_ffn,
    embedding_scale=lambda config: whole_number(config, "hidden_size") ** 0.5,
    score_scale=lambda config, width: 1.0,
    logits_cap="final_logit_softcapping",
    activation_setting="hidden_activation",
    kind_settings=_kind_settings,
)
MLX = MlxRecord(
    "gemma4_text",
    rope_types=frozenset({"proportional"}),
    partial_rotary=True,
    nested_rotary=True,
    windowed=True,
    honours={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, "vision", False),
    },
    checks=(_unknown_kinds,),
    translate=_translate,
)
_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_kv_shared_layers": 0,
}
FAMILIES = (
    Family(
        "gemma4_text",
        whole="gemma4",
        defaults=_DEFAULTS | {"sliding_window": 512, "hidden_size_per_layer_input": 256},
        decoder=DECODER,
        moe=MoeRecord(
            # Tools that quantise modules take the experts apart.
            (fused(LAYER + "experts."), per_expert(LAYER + "experts"), of_mlx(LAYER + "experts.switch_glu"), *GGUF),
            RouterRecord(
                ("router.proj.weight",), normalise=True, norm="router.scale", expert_scale="router.per_expert_scale"
            ),
            setting="enable_moe_block",
            shared="network",
            count_key="num_experts",
            per_token_key="top_k_experts",
            ffn_key="moe_intermediate_size",
        ),
        gguf=GgufRecord("gemma4", "Gemma4ForCausalLM", settings=_settings, own_heads=True),
        mlx=replace(MLX, block="experts", experts="switch_glu", route="given"),
    ),
    # Gemma-4-12B, whose GGUF files do not differ from those without experts.
    Family(
        "gemma4_unified_text",
        whole="gemma4_unified",
        defaults=_DEFAULTS | {"sliding_window": 1024},
        decoder=replace(DECODER, own_input=""),
        mlx=replace(
            MLX,
            translate=lambda config: _translate(config) | {"hidden_size_per_layer_input": 0},
        ),
    ),
)
