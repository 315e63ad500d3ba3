"""Types and bounds of the settings in ``config.json`` that this program or a library computes with.

Files are not trusted. A number in place of a table would raise an exception inside a library, and an unbounded number
would take unbounded memory or time. Types and bounds are therefore checked once, when the file is read. Settings that
are not listed are passed on unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import ModelError, damaged, shown
from engine.models.formats.json_files import check_values

LARGEST = 2**31 - 1
"""Maximum of any whole number, as the kernels count with 32-bit numbers."""
MOST_LAYERS = 10_000
"""Maximum decoder layers."""

_Rule = Callable[[Any], str | None]
"""Function that returns None for a valid value, else what the value must be."""


def whole(minimum: int, maximum: int = LARGEST) -> _Rule:
    def rule(value: Any) -> str | None:
        right = type(value) is int and minimum <= value <= maximum
        return None if right else f"a whole number from {minimum} to {maximum}"

    return rule


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _number(value: Any) -> str | None:
    return None if _is_number(value) else "a number"


def positive(value: Any) -> str | None:
    return None if _is_number(value) and value > 0 else "a number over 0"


def _share(value: Any) -> str | None:
    return None if _is_number(value) and 0 < value <= 1 else "a number over 0, at most 1"


def _base(value: Any) -> str | None:
    return None if _is_number(value) and value > 1 else "a number over 1"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "text"


def _one_of(names: str) -> _Rule:
    known = frozenset(names.split())

    def rule(value: Any) -> str | None:
        return None if isinstance(value, str) and value in known else f"one of {', '.join(sorted(known))}"

    return rule


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _table(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "a table of settings"


def _list_of(rule: _Rule, what: str) -> _Rule:
    def of(value: Any) -> str | None:
        return None if isinstance(value, list) and all(rule(item) is None for item in value) else f"a list of {what}"

    return of


def _each_layer(rule: _Rule) -> _Rule:
    """A value of all layers, or a list with one for each of them."""
    return lambda value: next(filter(None, map(rule, value)), None) if isinstance(value, list) else rule(value)


def _tokens(value: Any) -> str | None:
    ids = value if isinstance(value, list) else [value]
    right = all(type(number) is int and -1 <= number <= LARGEST for number in ids)
    return None if right else "a token id or a list of them"


def _rules(rule: _Rule, keys: str) -> dict[str, _Rule]:
    return dict.fromkeys(keys.split(), rule)


_RULES: dict[str, _Rule] = {
    **_rules(
        whole(1),
        "hidden_size intermediate_size_mlp shared_expert_intermediate_size "
        "num_hidden_layers num_attention_heads num_key_value_heads vocab_size max_position_embeddings "
        "num_experts n_routed_experts experts_per_token num_selected_experts "
        "vocab_size_per_layer_input laurel_rank altup_num_inputs "
        "num_attention_groups num_sliding_attention_heads share_expert_dim "
        "moe_k d_model n_heads n_layers max_seq_len kv_n_heads ffn_hidden_size moe_num_experts moe_top_k "
        "decoder_sparse_step interleave_moe_layer_step n_group topk_group kv_lora_rank q_lora_rank "
        "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv mamba_expand "
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "linear_head_dim linear_num_heads short_conv_kernel_size layer_group_size "
        "global_attn_every_n_layers conv_L_cache rotary_dim "
        "mamba_num_heads mamba_head_dim ssm_state_size conv_kernel n_groups "
        "moe_shared_expert_intermediate_size moe_latent_size global_head_dim num_global_key_value_heads top_k_experts "
        "qk_nope_head_dim v_head_dim block_size original_max_position_embeddings attention_chunk_size",
    ),
    **_rules(_each_layer(whole(1)), "intermediate_size moe_intermediate_size moe_topk"),
    **_rules(
        whole(0),
        "sliding_window max_window_layers first_k_dense_replace num_dense_layers n_shared_experts num_shared_experts "
        "num_nextn_predict_layers num_kv_shared_layers hidden_size_per_layer_input num_local_experts "
        "num_experts_per_tok shared_intermediate_size prefix_dense_intermediate_size sliding_window_size "
        "altup_active_idx head_dim qk_rope_head_dim",
    ),
    **_rules(
        _number,
        "attention_multiplier embedding_multiplier residual_multiplier logits_scaling routed_scaling_factor clip_qkv "
        "moe_router_scaling_factor route_scale moe_routed_scaling_factor moe_router_logit_softcapping kda_lower_bound "
        "swiglu_alpha swiglu_limit mscale mscale_all_dim attn_scale floor_scale attention_dropout initializer_range "
        "router_scaling_factor router_jitter_noise input_jitter_noise",
    ),
    **_rules(
        positive,
        "rms_norm_eps norm_eps factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor "
        "final_logit_softcapping attn_logit_softcapping query_pre_attn_scalar alpha logit_scale "
        "layer_norm_eps layer_norm_epsilon attention_value_scale",
    ),
    "partial_rotary_factor": _share,
    "rope_theta": _each_layer(_base),
    **_rules(_text, "model_type type topk_method scoring_func hybrid_override_pattern"),
    **_rules(
        _one_of(
            "gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish "
            "laplace leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh "
            "xielu"
        ),
        "hidden_act hidden_activation mlp_hidden_act mamba_hidden_act",
    ),
    "expert_selection_fn": _one_of("sigmoid softmax"),
    "shared_expert_combination_strategy": _one_of("average sum"),
    "rope_type": _one_of("default dynamic linear llama3 longrope mrope proportional su yarn"),
    **_rules(
        _flag,
        "tie_word_embeddings attention_bias mlp_bias qkv_bias norm_topk_prob use_sliding_window rope_interleave "
        "lm_head_bias use_qk_norm use_expert_bias conv_bias tie_embedding attention_k_eq_v mamba_conv_bias "
        "mamba_proj_bias use_conv_bias use_bias enable_moe_block mup_enabled use_double_wide_mlp truncate "
        "kda_safe_gate altup_correct_scale",
    ),
    **_rules(
        _table,
        "per_layer_config rope_parameters rope_scaling text_config attn_config ffn_config ffn_act_fn "
        "attention_other_setting "
        "linear_attn_config",
    ),
    **_rules(_list_of(_text, "names"), "layer_types layers_block_type mlp_layer_types architectures"),
    **_rules(_list_of(_number, "numbers"), "long_factor short_factor"),
    **_rules(_list_of(_share, "numbers over 0, at most 1"), "partial_rotary_factors"),
    **_rules(_list_of(whole(0), "layers"), "mlp_only_layers moe_layers no_rope_layers"),
    **_rules(_tokens, "bos_token_id eos_token_id pad_token_id"),
}
_SECTIONS = ("text_config", "attention_other_setting", "attn_config", "ffn_config", "ffn_act_fn")
_NEVER_NULL = ("hidden_act", "rope_type", "max_position_embeddings", "max_seq_len", "num_attention_heads", "vocab_size")
_NESTED = ("rope_parameters", "rope_scaling", "per_layer_config")
"""Sections that have sections of their own, for each kind of layers or each layer."""

_CODE = ("auto_map", "model_file", "kernel_config", "custom_pipelines", "custom_generate")
"""Settings that name code to be run."""
_IMPLEMENTATIONS = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "use_kernels",
)
"""Settings that choose implementations, possibly with downloaded code. They are removed."""


def check_config(config: dict[str, Any], name: str) -> None:
    """Raises ModelError naming the first setting of ``config`` that cannot be, with its value, or that names code.

    ``name`` is the file's.
    """
    check_values(config, name)
    _refuse_code(config, name, "")
    _check_section(config, name, "")


def whole_number(
    config: Mapping[str, Any], *keys: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST
) -> int:
    """The whole number that ``config`` has for the first of ``keys`` that is there, or ``default``. Dots in a key lead
    into sections.

    Raises ModelError if there is none, or it is out of range.
    """
    key = next((key for key in keys if setting(config, key) is not None), keys[0])
    value = setting(config, key)
    return int(_checked(key, default if value is None else value, whole(minimum, maximum)))


def positive_number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The number over 0 that ``config`` has for ``key``, or ``default``, whatever that is.

    Raises ModelError if there is none, or it is something else.
    """
    value = setting(config, key)
    return default if value is None and default is not None else float(_checked(key, value, positive))


def number_of(key: str) -> Callable[[Mapping[str, Any]], float]:
    """The function that gives the number over 0 of the setting ``key``, as :func:`positive_number` does."""
    return lambda config: positive_number(config, key)


def setting(config: Mapping[str, Any], key: str) -> Any:
    """What ``config`` has for ``key``, None if nothing. Dots lead into sections."""
    value: Any = config
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _checked(key: str, value: Any, rule: _Rule) -> Any:
    if value is None:
        raise damaged(f"config.json does not say {key}")
    wanted = rule(value)
    if wanted is not None:
        raise _impossible(key, value, wanted, "config.json")
    return value


def _impossible(key: str, value: Any, wanted: str, name: str) -> ModelError:
    return damaged(f"{name} gives {shown(value)} for {key}, which must be {wanted}")


def own_settings(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]] | None:
    """What layers have for themselves as transformers 5 writes it, by layer; None if ``config`` was not written so.

    The library fills the layers' numbers up with zeros, to the digits of the last one.
    """
    named = config.get("per_layer_config")
    if not isinstance(named, Mapping):
        return None
    return {int(layer): own for layer, own in named.items() if str(layer).isdecimal() and isinstance(own, Mapping)}


def without_implementations(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without settings that choose implementations, which this program decides."""
    return {
        key: without_implementations(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _IMPLEMENTATIONS
    }


def _check_section(section: Mapping[str, Any], name: str, where: str) -> None:
    for key, value in section.items():
        rule = _RULES.get(key)
        # A null means the library's default.
        wanted = None if rule is None or (value is None and key not in _NEVER_NULL) else rule(value)
        if wanted is not None:
            raise _impossible(f"{where}{shown(key)}", value, wanted, name)
        if isinstance(value, Mapping) and (key in (*_SECTIONS, *_NESTED) or any(each in where for each in _NESTED)):
            _check_section(value, name, f"{where}{key}.")
    layers, types = section.get("num_hidden_layers"), section.get("layer_types")
    # Step 3.5 names those that predict several tokens, too.
    ahead = section.get("num_nextn_predict_layers") or 0
    if layers is not None and types is not None and len(types) - layers not in (0, ahead):
        raise damaged(
            f"{name} gives {len(types)} entries for {where}layer_types and {layers} layers, which do not fit together"
        )


def _refuse_code(section: Mapping[str, Any], name: str, where: str) -> None:
    for key, value in section.items():
        if key in _CODE and value:
            raise ModelError(
                f"{name} asks for code from its repository ({where}{key}), which is never run; use a copy of the model "
                f"in transformers' own format, or, if the code is only the family's original, delete {key} from it."
            )
        if key in _IMPLEMENTATIONS and _names_a_repository(value):
            raise ModelError(
                f"{name} asks for code from a repository ({where}{key}: {shown(value)}), which is never run; "
                f"delete {key} from it."
            )
        if isinstance(value, Mapping):
            _refuse_code(value, name, f"{where}{shown(key)}.")


def _names_a_repository(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_names_a_repository, value.values()))
    return isinstance(value, str) and any(mark in value for mark in "/:@\\")
