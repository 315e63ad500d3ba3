"""MiMo-V2-Flash: values are narrower than keys, and layers with a window have twice the heads of keys, and sinks."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError, shown
from engine.models.architectures.config_values import positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import experts, network_kinds, rotated_part, sliding_layers
from engine.models.architectures.layer_rules import kind_windows, kinds_by, rope_by_kind, sparse_layers
from engine.models.architectures.parts import GROUPED, QWEN
from engine.models.architectures.record import Config, DecoderRecord, Family, GgufRecord, MlxRecord, MoeRecord

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROTATED = 0.334
"""Share of each head that is rotated, of 192 numbers 64."""
_rope = rope_by_kind(
    {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": _ROTATED},
    {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": _ROTATED},
)


def _kind(config: Config, layer: int) -> str:
    """The first layer and every sixth see everything, the others a window."""
    return _FULL if layer == 0 or (layer + 1) % 6 == 0 else _SLIDING


_KINDS = kinds_by(_kind)


def _renamed(config: Config) -> Config:
    """The published ``sliding_window_size`` does not count the query's own position."""
    before = config.get("sliding_window_size")
    return {} if before is None else {"sliding_window": whole_number(config, "sliding_window_size") + 1}


def _more_keys(config: Config, kind: str) -> Config:
    return {"num_key_value_heads": 2 * whole_number(config, "num_key_value_heads")} if kind == _SLIDING else {}


# --- GGUF files -------------------------------------------------------------------------------------------------------


def _settings(metadata: Metadata) -> dict[str, Any]:
    layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    kinds = sliding_layers(metadata, 6)[:layers]
    counts, full = metadata.each_layer("attention.head_count_kv")[:layers], metadata.real("rope.freq_base", 10_000.0)
    fewest = min(counts)
    if fewest < 1 or counts != [2 * fewest if kind == _SLIDING else fewest for kind in kinds]:
        raise ModelError(
            f"{metadata.file.path} gives {shown(counts)} for head_count_kv, which must be twice as many in layers "
            "with a window; use another file of this model."
        )
    rope = {"rope_type": "default", "partial_rotary_factor": rotated_part(metadata)}
    return {
        **experts("n_routed_experts")(metadata),
        "num_hidden_layers": layers,
        "num_key_value_heads": fewest,
        "v_head_dim": metadata.number("attention.value_length"),
        "attention_value_scale": metadata.short_real("attention.value_scale", 1.0),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "layer_types": kinds,
        "mlp_layer_types": network_kinds(metadata, layers),
        "sliding_window": metadata.number("attention.sliding_window"),
        "rope_parameters": {
            _FULL: {**rope, "rope_theta": full},
            _SLIDING: {**rope, "rope_theta": metadata.real("rope.freq_base_swa", full)},
        },
    }


# --- mlx --------------------------------------------------------------------------------------------------------------


def _one_kind(config: Config) -> str | None:
    """mlx-lm looks for a layer of each kind."""
    kinds = config.get("layer_types")
    return f"layer_types {kinds!r}" if isinstance(kinds, list) and len(set(kinds)) < 2 else None


def _other_shares(config: Config) -> str | None:
    """mlx-lm rotates the same share of all heads."""
    shares = [_rope(config, kind).get("partial_rotary_factor", _ROTATED) for kind in (_FULL, _SLIDING)]
    return None if shares[0] == shares[1] else f"partial_rotary_factor {shares[1]!r} of {_SLIDING}"


def _translate(config: Config) -> dict[str, Any]:
    layers, full, sliding = whole_number(config, "num_hidden_layers"), _rope(config, _FULL), _rope(config, _SLIDING)
    sparse = sparse_layers(lambda config: 1)(config, layers)
    return {
        "hybrid_layer_pattern": [int(kind == _SLIDING) for kind in _KINDS(config, layers)],
        "moe_layer_freq": [int(layer in sparse) for layer in range(layers)],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": config["sliding_window"],
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_theta": full["rope_theta"],
        "swa_rope_theta": sliding["rope_theta"],
        "partial_rotary_factor": full.get("partial_rotary_factor", _ROTATED),
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
    }


FAMILIES = (
    Family(
        "mimo_v2_flash",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
        },
        renamed=_renamed,
        decoder=DecoderRecord(
            layer_kind=_kind,
            head_kinds=_KINDS,
            kind_rope=_rope,
            kind_settings=_more_keys,
            windows=kind_windows(_KINDS),
            value_width="v_head_dim",
            value_scale=lambda config: positive_number(config, "attention_value_scale", 1.0),
            sinks=lambda config, kind: kind == _SLIDING,
            qkv_bias="attention_bias",
            rotated=_ROTATED,
            names={"self_attn.sinks": "self_attn.attention_sink_bias"},
        ),
        moe=MoeRecord(
            QWEN,
            GROUPED,
            layers=sparse_layers(lambda config: 1),
            count_key="n_routed_experts",
            ffn_key="moe_intermediate_size",
        ),
        unused=("model.mtp.",),
        tokenizer_class="TokenizersBackend",
        gguf=GgufRecord("mimo2", "MiMoV2FlashForCausalLM", settings=_settings, own_heads=True),
        mlx=MlxRecord(
            "mimo_v2_flash",
            route="own-gate",
            partial_rotary=True,
            partial_windows=True,
            nested_rotary=True,
            windowed=True,
            honours={"hidden_act": ("silu",), "attention_bias": (False,), "n_group": (1,)},
            checks=(_one_kind, _other_shares),
            translate=_translate,
        ),
    ),
)
