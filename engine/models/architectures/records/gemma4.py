"""Gemma 4 with experts, without pictures: layers with a sliding window and with full attention have heads of different
sizes, and every layer has a dense feed-forward network beside its experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from engine.errors import ModelError, shown
from engine.models.architectures.config_values import own_settings
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor, projections
from engine.models.architectures.layer_rules import named_windows
from engine.models.architectures.parts import GGUF, LAYER, fused, of_mlx
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


# --- config.json ------------------------------------------------------------------------------------------------------


def _moe_layers(config: Config, layers: int) -> list[int]:
    if not config.get("enable_moe_block"):
        raise ModelError(
            "config.json describes a Gemma 4 model without experts, which is not supported; take Gemma-4-26B-A4B."
        )
    return list(range(layers))


def _kind_settings(config: Config, kind: str) -> Config:
    """Layers with full attention have other heads."""
    if kind != "full_attention":
        return {}
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return {
        "head_dim": config.get("global_head_dim", 512),
        "num_key_value_heads": heads or config.get("num_key_value_heads"),
    }


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


def _unknown_rotary(config: Config) -> str | None:
    rope = config.get("rope_parameters") or {}
    for kind, known in (("full_attention", "proportional"), ("sliding_attention", "default")):
        found = rope.get(kind, {}).get("rope_type", known)
        if found != known:
            return f"rope_type {found!r} of {kind}"
    return None


def _translate(config: Config) -> Config:
    """transformers 5 writes what layers with full attention have of their own for each of them."""
    full = "full_attention"
    own = own_settings(config)
    layer = config["layer_types"].index(full) if full in config["layer_types"] else 0
    wide = {**config, **(_kind_settings(config, full) if own is None else own.get(layer, {}))}
    return {"global_head_dim": wide["head_dim"], "num_global_key_value_heads": wide["num_key_value_heads"]}


# --- GGUF files -------------------------------------------------------------------------------------------------------


def _settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is missing or impossible,
    and for what models without experts have: keys shared by layers, and embeddings of every layer."""
    gguf, layers = metadata.file, metadata.number("block_count")
    for key in ("attention.shared_kv_layers", "embedding_length_per_layer_input"):
        if metadata.number(key, 0):
            raise ModelError(
                f"{gguf.path} has a {key} of {metadata.number(key)}, which does not run; use Gemma-4-26B-A4B."
            )
    slides = metadata.get("attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) < layers or slides[layers - 1]:
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
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": metadata.number("attention.sliding_window"),
        "head_dim": metadata.number("attention.key_length_swa"),
        "global_head_dim": wide,
        "num_key_value_heads": counts[narrow],
        "num_global_key_value_heads": counts[full],
        # Files leave the values of such layers out, as they are the keys.
        "attention_k_eq_v": not {f"blk.{full}.attn_v.weight", f"blk.{full}.attn_qkv.weight"} & gguf.tensors.keys(),
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": True,
        "use_double_wide_mlp": False,
        "num_experts": metadata.number("expert_count"),
        "top_k_experts": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
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


def _layer_shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, prefix: str) -> Iterator[NamedTensor]:
    """The tensors of a layer but for its experts, its router and the norms that layers of all kinds have."""
    layer = int(here.split(".")[1])
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kind = "" if config["layer_types"][layer] == "sliding_attention" else "global_"
    size, groups = config[f"{kind}head_dim"], config[f"num_{kind}key_value_heads"]
    queries, keys = config["num_attention_heads"] * size, groups * size
    rows = {"q": queries, "k": keys} | ({} if kind and config["attention_k_eq_v"] else {"v": keys})
    each = ((f"{here}attn_{short}.weight", f"{prefix}self_attn.{short}_proj.weight", rows[short]) for short in rows)
    yield from projections(gguf, here + "attn_qkv.weight", each, (hidden,))
    tensors: list[tuple[str, str, tuple[int, ...]]] = [
        ("attn_output.weight", "self_attn.o_proj.weight", (hidden, queries)),
        ("attn_q_norm.weight", "self_attn.q_norm.weight", (size,)),
        ("attn_k_norm.weight", "self_attn.k_norm.weight", (size,)),
        ("ffn_gate.weight", "mlp.gate_proj.weight", (inner, hidden)),
        ("ffn_up.weight", "mlp.up_proj.weight", (inner, hidden)),
        ("ffn_down.weight", "mlp.down_proj.weight", (hidden, inner)),
        ("ffn_norm.weight", "pre_feedforward_layernorm.weight", (hidden,)),
        ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", (hidden,)),
        ("post_ffw_norm.weight", "post_feedforward_layernorm.weight", (hidden,)),
        ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", (hidden,)),
        ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", (hidden,)),
        ("ffn_gate_inp.scale", "router.scale", (hidden,)),
        ("ffn_down_exps.scale", "router.per_expert_scale", (config["num_experts"],)),
        ("layer_output_scale.weight", "layer_scalar", (1,)),
    ]
    for source, name, shape in tensors:
        yield NamedTensor.whole(here + source, prefix + name, shape)


FAMILIES = (
    Family(
        "gemma4_text",
        whole="gemma4",
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
        decoder=DecoderRecord(
            sandwiched=True,
            windows=named_windows,
            head_norm="per-head",
            activation_setting="hidden_activation",
            kind_settings=_kind_settings,
        ),
        moe=MoeRecord(
            (fused(LAYER + "experts."), of_mlx(LAYER + "experts.switch_glu"), *GGUF),
            RouterRecord(("router.proj.weight",), normalise=True),
            layers=_moe_layers,
            count_key="num_experts",
            per_token_key="top_k_experts",
            ffn_key="moe_intermediate_size",
        ),
        gguf=GgufRecord("gemma4", "Gemma4ForCausalLM", settings=_settings, own_heads=True, mixer=_layer_shapes),
        mlx=MlxRecord(
            "gemma4_text",
            block="experts",
            experts="switch_glu",
            route="given",
            nested_rotary=True,
            windowed=True,
            honours={
                "hidden_activation": ("gelu_pytorch_tanh",),
                "enable_moe_block": (True,),
                "num_kv_shared_layers": (0,),
                "hidden_size_per_layer_input": (0,),
                "attention_bias": (False,),
                "use_bidirectional_attention": (None, "vision", False),
            },
            checks=(_unknown_kinds, _unknown_rotary),
            translate=_translate,
        ),
    ),
)
