"""Step 3.5 and 3.7: heads have gates, layers with a window have more heads and other rotations, and what SiLU gives
within networks and experts has limits in the last layers."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError, damaged, shown
from engine.models.architectures.config_values import number_of, positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import (
    experts,
    limits,
    llama3_parameters,
    network_kinds,
    rotated_part,
    sliding_layers,
    without_ones,
)
from engine.models.architectures.layer_rules import (
    KINDS,
    kind_windows,
    kinds_by,
    listed_limits,
    rope_by_kind,
    sparse_layers,
)
from engine.models.architectures.parts import LAYER, QWEN, of_mlx
from engine.models.architectures.record import (
    SCALED_ROPE,
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    HeadGate,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)

_SLIDING, _FULL = KINDS
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_rope = rope_by_kind(_ROPE, _ROPE)
_KINDS = kinds_by(lambda config, layer: _FULL)
_SPARSE = sparse_layers(lambda config: 3)
_TOKENS, _HIGH = 131_072, 32.0
"""Length of the texts that the model was trained on before its positions were scaled, and its factor of high
frequencies."""

# --- config.json ------------------------------------------------------------------------------------------------------

_OLDER = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
}
"""Names of settings in the published files, and transformers'."""
_EACH_LAYER = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")


def _renamed(config: Config) -> dict[str, Any]:
    """Raises ModelError for other heads of layers with a window than transformers knows, or a list of layers that is
    none."""
    layers = whole_number(config, "num_hidden_layers", default=45)
    given = {new: config[old] for old, new in _OLDER.items() if old in config and new not in config}
    # transformers takes no other, whatever the file says.
    settings = given | {"hidden_act": "silu"}
    ahead = whole_number(config, "num_nextn_predict_layers", default=0, minimum=0)
    for key in _EACH_LAYER:
        if isinstance(config.get(key), list) and len(config[key]) == layers + ahead:
            settings[key] = config[key][:layers]
    named = config.get("moe_layers_enum")
    if named is not None and config.get("mlp_layer_types") is None:
        sparse = _numbers(named)
        settings["mlp_layer_types"] = ["sparse" if layer in sparse else "dense" for layer in range(layers)]
    sliding = config.get("attention_other_setting")
    if sliding and config.get("num_sliding_attention_heads") is None:
        settings["num_sliding_attention_heads"] = _sliding_heads({**config, **given}, sliding)
    kinds = settings.get("layer_types", config.get("layer_types")) or [_FULL] * layers
    if not all(isinstance((config.get("rope_parameters") or {}).get(kind), dict) for kind in set(kinds)):
        settings |= {"rope_parameters": _older_rope(config, kinds), "rope_scaling": None}
        settings |= {"rope_theta": None, "partial_rotary_factors": None}
    return settings


def _numbers(named: Any) -> frozenset[int]:
    """The layers that ``moe_layers_enum`` names: numbers, or text with commas between them."""
    each = named.split(",") if isinstance(named, str) else named
    if not isinstance(each, list) or not all(str(one).strip().isdecimal() or one == "" for one in each):
        raise damaged(f"config.json gives {shown(named)} for moe_layers_enum, which must be a list of layers")
    return frozenset(int(one) for one in each if str(one).strip())


def _sliding_heads(config: Config, sliding: Config) -> int:
    for key, usual in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
        if sliding.get(key) not in (None, config.get(usual)):
            raise ModelError(
                f"config.json gives layers with a window a {key} of {shown(sliding[key])}, which does not run; use "
                "another model."
            )
    return whole_number(sliding, "num_attention_heads", default=config.get("num_attention_heads"))


def _older_rope(config: Config, kinds: list[str]) -> dict[str, Any]:
    """Rotary settings by kind from lists for each layer; scaled are those of layers that see everything."""
    bases, shares = config.get("rope_theta"), config.get("partial_rotary_factors")
    settings: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        layer = kinds.index(kind)
        if any(isinstance(each, list) and layer >= len(each) for each in (bases, shares)):
            raise damaged(f"config.json has no rotary settings of layer {layer + 1}")
        base = bases[layer] if isinstance(bases, list) else bases
        settings[kind] = {**_ROPE, **({} if base is None else {"rope_theta": base})}
        if shares:
            settings[kind]["partial_rotary_factor"] = shares[layer]
    if _FULL in settings:
        settings[_FULL] |= config.get("rope_scaling") or {}
    return settings


def _more_heads(config: Config, kind: str) -> Config:
    heads = config.get("num_sliding_attention_heads")
    return {} if kind != _SLIDING or heads is None else {"num_attention_heads": heads}


# --- GGUF files -------------------------------------------------------------------------------------------------------


def _settings(metadata: Metadata) -> dict[str, Any]:
    """Raises ModelError for heads that differ within a kind of layers, or another router."""
    path, layers = metadata.file.path, metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    if metadata.get("expert_gating_func", 2) not in (0, 2):
        raise ModelError(f"{path} routes by the function {metadata.get('expert_gating_func')}; use another file.")
    kinds = sliding_layers(metadata, 1)[:layers]
    heads = dict(zip(kinds, metadata.each_layer("attention.head_count"), strict=False))
    groups = metadata.each_layer("attention.head_count_kv")[:layers]
    stated = metadata.each_layer("attention.head_count")[:layers]
    if layers < 1 or stated != [heads[kind] for kind in kinds] or len(set(groups)) > 1 or groups[0] < 1:
        raise ModelError(
            f"{path} gives {shown(stated)} heads over {shown(groups)}, which must be alike in layers of a kind; use "
            "another file of this model."
        )
    return {
        **experts("n_routed_experts")(metadata),
        "num_hidden_layers": layers,
        "num_attention_heads": heads.get(_FULL, heads[kinds[0]]),
        "num_sliding_attention_heads": heads.get(_SLIDING, heads[kinds[0]]),
        "num_key_value_heads": groups[0],
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "share_expert_dim": metadata.number("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
        "layer_types": kinds,
        "mlp_layer_types": network_kinds(metadata, layers),
        "sliding_window": metadata.number("attention.sliding_window"),
        "swiglu_limits": limits(metadata, "swiglu_clamp_exp", layers),
        "swiglu_limits_shared": limits(metadata, "swiglu_clamp_shexp", layers),
        "rope_parameters": _rope_of_file(metadata, kinds),
    }


def _rope_of_file(metadata: Metadata, kinds: list[str]) -> dict[str, Any]:
    """llama.cpp rotates half of what the file says in layers that see everything.

    It scales the frequencies of a whole head, of which it then uses the first; the model was trained with those of the
    part that is rotated, scaled by the same settings.
    """
    gguf, base, part = metadata.file, metadata.real("rope.freq_base", 10_000.0), rotated_part(metadata)
    scaled: dict[str, Any] | None = {**_ROPE, "rope_theta": base}
    if "rope_freqs.weight" in gguf.tensors:
        scaled = llama3_parameters(gguf, base, metadata.head_width(), _TOKENS, _HIGH)
    if scaled is None:
        raise ModelError(f"{gguf.path} scales its positions in a way that is not Step 3.5's; use another file.")
    sliding = metadata.number("rope.dimension_count_swa", round(part * metadata.head_width())) / metadata.head_width()
    rope = {
        _FULL: {**scaled, "partial_rotary_factor": part / 2},
        _SLIDING: {
            **_ROPE,
            "rope_theta": metadata.real("rope.freq_base_swa", base),
            "partial_rotary_factor": sliding,
        },
    }
    return {kind: rope[kind] for kind in dict.fromkeys(kinds)}


# --- mlx --------------------------------------------------------------------------------------------------------------


def _other_scale(config: Config) -> str | None:
    """mlx-lm divides scores by the root of the width of heads."""
    scale = config.get("query_pre_attn_scalar")
    return None if scale in (None, config.get("head_dim")) else f"query_pre_attn_scalar {scale!r}"


def _no_experts(config: Config) -> str | None:
    kinds = config.get("mlp_layer_types")
    return None if not isinstance(kinds, list) or "sparse" in kinds else f"mlp_layer_types {kinds!r}"


def _translate(config: Config) -> dict[str, Any]:
    layers = whole_number(config, "num_hidden_layers")
    kinds = _KINDS(config, layers)
    ropes = [_rope(config, kind) for kind in kinds]
    sliding = {
        "num_attention_heads": config.get("num_sliding_attention_heads") or config["num_attention_heads"],
        "num_attention_groups": config["num_key_value_heads"],
    }
    return {
        "layer_types": kinds,
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "num_attention_groups": config["num_key_value_heads"],
        "attention_other_setting": sliding,
        "moe_layers_enum": ",".join(map(str, _SPARSE(config, layers))),
        "norm_expert_weight": True,
        "rope_theta": [rope["rope_theta"] for rope in ropes],
        "partial_rotary_factors": [rope.get("partial_rotary_factor", 1.0) for rope in ropes],
        "yarn_only_types": [_FULL],
    }


FAMILIES = (
    Family(
        "step3p5",
        whole="step3p7",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "moe_router_scaling_factor": 1.0,
        },
        renamed=_renamed,
        stored_names=(
            (".moe.gate.", ".mlp.gate."),
            (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
            (".mlp.share_expert.", ".mlp.shared_experts."),
            (".share_expert.", ".mlp.shared_experts."),
        ),
        decoder=DecoderRecord(
            offset_norms=True,
            head_kinds=_KINDS,
            kind_rope=_rope,
            kind_settings=_more_heads,
            windows=kind_windows(_KINDS),
            head_norm="per-head",
            head_gate=HeadGate("g_proj", whole=lambda config: True),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            rotated=1.0,
            score_scale=lambda config, width: positive_number(config, "query_pre_attn_scalar", float(width)) ** -0.5,
            limit=listed_limits("swiglu_limits_shared"),
        ),
        moe=MoeRecord(
            (*QWEN, of_mlx(LAYER + "moe")),
            RouterRecord(
                ("mlp.gate.weight",),
                scoring="sigmoid",
                normalise=True,
                correction="mlp.gate.e_score_correction_bias",
                scale=number_of("moe_router_scaling_factor"),
            ),
            shared="plain",
            shared_ffn=lambda config: whole_number(config, "share_expert_dim"),
            limit=listed_limits("swiglu_limits"),
            layers=_SPARSE,
            count_key="n_routed_experts",
            ffn_key="moe_intermediate_size",
        ),
        extra_layers=True,
        gguf=GgufRecord(
            "step35",
            "Step3p7ForConditionalGeneration",
            settings=_settings,
            own_heads=True,
            changes=without_ones,
        ),
        mlx=MlxRecord(
            "step3p5",
            route="own-gate",
            rope_types=SCALED_ROPE,
            partial_rotary=True,
            partial_windows=True,
            windowed=True,
            honours={"attention_bias": (False,), "mlp_bias": (False,), "tie_word_embeddings": (False,)},
            checks=(_other_scale, _no_experts),
            translate=_translate,
            stored_names=(
                (".mlp.gate.router_bias", ".mlp.gate.e_score_correction_bias"),
                (".mlp.gate.gate.", ".mlp.gate."),
                (".mlp.share_expert.", ".mlp.shared_experts."),
            ),
            adds_one=True,
        ),
    ),
)
