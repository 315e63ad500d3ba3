"""What the converter of llama.cpp says of a model in its metadata, for tiny models, and a tokenizer for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Literal

from gguf import ExpertGatingFuncType, GGUFValueType, GGUFWriter, RopeScalingType

from engine.models.architectures.families import FAMILIES
from engine.models.architectures.ngrams import ngram_hashes

Layout = Literal["stacked", "fused", "separate"]
"""How the experts of a layer are stored: one tensor for each matrix, gate and up in one tensor, one for each expert."""

DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next", "qwen4exp")
"""Architectures whose layers are mostly gated delta-nets."""
KIMI_DELTAS = ("kimi-linear", "bailingmoe3", "glm5-next")
"""Architectures with delta-nets whose keys decay each by itself, and attention over latents."""
NEMOTRONS = ("nemotron_h_moe", "nemotron_h")
"""Architectures whose layers have one part each; the second has no experts."""
LATENT = ("deepseek2", "mistral4", "deepseek32", "glm-dsa", *KIMI_DELTAS)
"""Architectures with attention over latents."""

ARRAY, UINT64 = GGUFValueType.ARRAY, GGUFValueType.UINT64
PLACEHOLDER = 150
"""Id of the token that stands for pictures, in families that see."""
TOKENS = [chr(code) for code in range(33, 127)] + [f"{a}{b}" for a in "abcdefgh" for b in "aeiou"] + ["Ġ", "Ċ"]

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Families' names of the number of experts."""


def write_metadata(
    writer: GGUFWriter, config: dict[str, Any], architecture: str, extra: dict[str, Any], pre: str, layout: Layout
) -> None:
    """Write what ``config`` of a model says, and ``extra``. ``pre``: the rule by which texts are split."""
    used = (
        config.get("num_experts_per_tok")
        or config.get("top_k_experts")
        or config.get("moe_topk")
        or config.get("moe_k")
    )
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    width = next(config[f"{kind}intermediate_size"] for kind in ("", "moe_") if f"{kind}intermediate_size" in config)
    width = config.get("intermediate_size_mlp", width)
    shared = config.get("num_kv_shared_layers") or 0
    if architecture in NEMOTRONS:
        width = config["moe_intermediate_size"] if architecture == "nemotron_h_moe" else width
        writer.add_feed_forward_length([width if kind in ("moe", "mlp") else 0 for kind in config["layer_types"]])
    elif config.get("use_double_wide_mlp"):
        writer.add_feed_forward_length([width] * (config["num_hidden_layers"] - shared) + [2 * width] * shared)
    else:
        if config.get("block_auto_adjust_ff_dim"):
            step = config["block_multiple_of"]
            width = -(-int(2 * width / 3) // step) * step
        writer.add_feed_forward_length(width)
    if architecture != "step35":
        writer.add_head_count(config["num_attention_heads"])
    split = architecture in LATENT and layout != "separate"
    heads = 1 if split else config["num_key_value_heads"]
    if architecture in ("lfm2", "lfm2moe"):
        _write_convolutions(writer, config)
    elif architecture in ("granitehybrid", *NEMOTRONS):
        _write_mamba(writer, config)
    elif architecture == "gemma4":
        _write_two_kinds(writer, config)
    elif architecture == "mimo2":
        _write_narrow_values(writer, config)
    elif architecture == "step35":
        _write_limits(writer, config)
    elif architecture == "gemma3n":
        _write_altup(writer, config)
    elif architecture == "deepseek4":
        _write_compressed_keys(writer, config)
    elif architecture in KIMI_DELTAS:
        writer.add_head_count_kv([heads if kind != "linear_attention" else 0 for kind in config["layer_types"]])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_kda_head_dim(config["linear_head_dim"])
        if architecture == "glm5-next":
            _write_pools(writer, config)
        if architecture == "bailingmoe3":
            writer.add_bool("bailingmoe3.kda.safe_gate", config["kda_safe_gate"])
            writer.add_float32("bailingmoe3.kda.gate_lower_bound", config["kda_lower_bound"])
            if "expert_swiglu_limit_list" in config:
                writer.add_swiglu_clamp_exp(config["expert_swiglu_limit_list"])
                writer.add_swiglu_clamp_shexp(config["share_expert_swiglu_limit_list"])
    else:
        writer.add_head_count_kv(heads)
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        norms = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        writer.add_layer_norm_rms_eps(next(config[name] for name in norms if config.get(name)))
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10_000.0}
    base = rope.get("full_attention", rope.get("main", rope))["rope_theta"]
    if "alpha" in rope:
        base *= rope["alpha"] ** (config["head_dim"] / (config["head_dim"] - 2))
    writer.add_rope_freq_base(base)
    if architecture in LATENT:
        _write_latents(writer, config, layout)
    elif config.get("head_dim") and architecture not in ("gemma4", "mimo2"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if (
        used
        and config.get("enable_moe_block", True)
        and config.get("num_local_experts") != 0
        and architecture != "nemotron_h"
        and "expert_count" not in extra
    ):
        writer.add_expert_count(next(config[key] for key in COUNTS if config.get(key)))
        writer.add_expert_used_count(used)
    if config.get("moe_intermediate_size") and architecture != "nemotron_h":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "minimax-m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
        if config["rope_parameters"]["rope_type"] == "yarn":
            _write_yarn(writer, config["rope_parameters"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    if architecture == "hunyuan-moe":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    if architecture == "exaone-moe":
        shared = config["num_shared_experts"] * config["moe_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    if architecture == "nemotron_h_moe":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
    if architecture == "granitemoe" and config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if architecture == "hy_v3":
        writer.add_expert_shared_feed_forward_length(config["num_shared_experts"] * config["moe_intermediate_size"])
        writer.add_expert_weights_scale(config["router_scaling_factor"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    elif architecture == "afmoe":
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["route_scale"])
        writer.add_sliding_window(config["sliding_window"])
    elif architecture not in ("nemotron_h", "deepseek4") and (
        config.get("n_shared_experts") or config.get("num_shared_experts")
    ):
        _write_shared(writer, config)
    if architecture in ("glm4moe", "glm4", "minimax-m2"):
        writer.add_rope_dimension_count(
            round(config["rope_parameters"].get("partial_rotary_factor", 1.0) * config["head_dim"])
        )
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    if architecture in DELTA_NETS:
        rope = config["rope_parameters"]
        writer.add_rope_dimension_count(round(rope["partial_rotary_factor"] * config["head_dim"]))
        if "mrope_section" in rope:
            writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        writer.add_full_attention_interval(4)
        if architecture == "qwen3next":
            recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
            writer.add_array(f"{architecture}.attention.recurrent_layers", recurrent)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    if architecture == "qwen4exp":
        _write_streams(writer, config)
    if architecture == "llama4":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if architecture in ("gemma3", "olmo2", "exaone4", "exaone-moe", "phi3", "cohere2") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture in ("olmo2", "exaone4", "exaone-moe") and config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    whole_rope = rope.get("full_attention", rope)
    if architecture in ("gemma3", "olmo2") and whole_rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole_rope["factor"])
    if architecture in ("qwen3vl", "qwen3vlmoe"):
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if architecture == "mistral3":
        writer.add_float32("mistral3.attention.temperature_scale", whole_rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(whole_rope["mscale_all_dim"])
    if architecture == "mistral4":
        writer.add_float32("mistral4.attention.temperature_scale", rope["llama_4_scaling_beta"])
        writer.add_uint32("mistral4.attention.temperature_length", rope["original_max_position_embeddings"])
    if architecture in ("olmo2", "mistral3") and whole_rope["rope_type"] == "yarn":
        _write_yarn(writer, whole_rope)
    if architecture in ("granite", "granitemoe", "granitehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    for key, value in extra.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add[type(value)](key if key.startswith("general.") else f"{architecture}.{key}", value)
    named = {PLACEHOLDER: "<|image_pad|>"} if architecture.startswith(("qwen35", "qwen3vl")) else {}
    if architecture in ("mistral3", "mistral4", "llama"):
        named = {PLACEHOLDER: "[IMG]", PLACEHOLDER + 1: "[IMG_BREAK]", PLACEHOLDER + 2: "[IMG_END]"}
    if architecture == "gemma3":
        named = {PLACEHOLDER: "<start_of_image>", PLACEHOLDER + 1: "<end_of_image>"}
    if architecture == "gemma4":
        named = {PLACEHOLDER: "<|image|>", PLACEHOLDER + 1: "<|image>", PLACEHOLDER + 2: "<image|>"}
    add_tokenizer(writer, config["vocab_size"], pre, named)


def _write_streams(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """qwen4exp's residual streams, its indexers, and the table of n-grams with the numbers of its hash."""
    numbers = {
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
    }
    ratio = config["indexer_compress_ratio"]
    ratios = [0 if kind == "linear_attention" else ratio for kind in config["layer_types"]]
    writer.add_array("qwen4exp.attention.compress_ratios", ratios)
    layers = config["ple_layer_ids"]
    if layers:
        own = ngram_hashes(config)[0]
        numbers |= {
            "ple.ngram_size": own.tokens,
            "ple.heads_per_ngram": own.heads_each,
            "ple.conv_kernel": config["ple_conv_kernel_size"],
            "ple.eos_token_id": own.end,
            "embedding_length_per_layer_input": config["ple_embed_dim"] // len(own.sizes),
        }
        writer.add_array("qwen4exp.ple.layers", [layer - 1 for layer in layers])
        writer.add_key_value("qwen4exp.ple.layer_multipliers", list(own.multipliers), ARRAY, UINT64)
        writer.add_key_value("qwen4exp.ple.head_offsets", list(own.offsets), ARRAY, UINT64)
        writer.add_key_value("qwen4exp.ple.head_vocab_sizes", list(own.sizes), ARRAY, UINT64)
    for key, value in numbers.items():
        writer.add_uint32(f"qwen4exp.{key}", value)


def _write_pools(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """glm5-next's pools of tokens, residual streams, and limits."""
    writer.add_float32("glm5-next.kda.gate_lower_bound", config["linear_lower_bound"])
    writer.add_bool("glm5-next.attention.indexer.kpool_select_tail", config["index_kpool_always_select_tail"])
    writer.add_uint32("glm5-next.attention.indexer.kpool", config["index_kpool"])
    _write_mixed_streams(writer, config)


def _write_mixed_streams(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Residual streams that doubly stochastic matrices mix, and the limit of networks beside them."""
    writer.add_swiglu_clamp_exp([config["swiglu_limit"]] * config["num_hidden_layers"])
    writer.add_float32(f"{writer.arch}.hyper_connection.epsilon", config["hc_eps"])
    writer.add_uint32(f"{writer.arch}.hyper_connection.count", config["hc_mult"])
    writer.add_uint32(f"{writer.arch}.hyper_connection.sinkhorn_iterations", config["hc_sinkhorn_iters"])


def _write_compressed_keys(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """deepseek4's compressed keys, routers, residual streams, and limits."""
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    rates = {"sliding_attention": 0, **config["compress_rates"]}
    writer.add_array("deepseek4.attention.compress_ratios", [rates[kind] for kind in config["layer_types"]])
    writer.add_uint32("deepseek4.attention.output_group_count", config["o_groups"])
    writer.add_uint32("deepseek4.attention.output_lora_rank", config["o_lora_rank"])
    writer.add_float32("deepseek4.attention.compress_rope_freq_base", config["compress_rope_theta"])
    writer.add_uint32("deepseek4.hash_layer_count", config["mlp_layer_types"].count("hash_moe"))
    writer.add_uint32("deepseek4.embedding_length_out", config["hidden_size"] * config["hc_mult"])
    writer.add_uint32("deepseek4.expert_gating_func", 4)  # the root of the softplus
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["rope_parameters"]["compress"]["rope_type"] == "yarn":
        _write_yarn(writer, config["rope_parameters"]["compress"])
    _write_mixed_streams(writer, config)


def _write_latents(writer: GGUFWriter, config: dict[str, Any], layout: Layout) -> None:
    rope, latents, rotated = (
        config.get("rope_parameters") or {"rope_type": "default"},
        config["kv_lora_rank"],
        config["qk_rope_head_dim"],
    )
    keys, values = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latents)
    if layout == "separate":
        writer.add_key_length(keys)
        writer.add_value_length(values)
    else:
        writer.add_key_length(latents + rotated)
        writer.add_value_length(latents)
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(values)
    writer.add_rope_dimension_count(rotated)
    if "index_topk" in config:
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    if "indexer_types" in config:
        kinds = [int(kind == "full") for kind in config["indexer_types"]]
        writer.add_array(f"{writer.arch}.attention.indexer.types", kinds)
    if rope["rope_type"] == "yarn":
        _write_yarn(writer, rope)
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_two_kinds(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """gemma4's layers with a sliding window and with full attention."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    wide = next(iter(config["per_layer_config"].values()))
    narrow = config["head_dim"]
    counts = (wide.get("num_key_value_heads", config["num_key_value_heads"]), config["num_key_value_heads"])
    writer.add_head_count_kv([counts[one] for one in slides])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input", 0))
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_key_length(wide["head_dim"])
    writer.add_value_length(wide["head_dim"])
    writer.add_key_length_swa(narrow)
    writer.add_value_length_swa(narrow)
    writer.add_rope_dimension_count(wide["head_dim"])
    writer.add_rope_dimension_count_swa(narrow)


def _write_narrow_values(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """mimo2's layers with a sliding window, which have twice the heads of keys, and its values."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads, rope = config["num_key_value_heads"], config["rope_parameters"]
    writer.add_head_count_kv([2 * heads if one else heads for one in slides])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    writer.add_rope_dimension_count(int(rope["full_attention"]["partial_rotary_factor"] * config["head_dim"]))
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)


def _write_altup(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """gemma3n's residual streams, its layers with a sliding window, and how few gates of its networks count."""
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -math.inf for share in shares])


def _write_limits(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """step35's heads by layer, its rotations, its experts, and their limits."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    counts = config["num_attention_heads"], config["num_sliding_attention_heads"]
    writer.add_head_count([counts[one] for one in slides])
    writer.add_head_count_kv([config["num_key_value_heads"]] * len(slides))
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_swiglu_clamp_exp([limit or 0.0 for limit in config["swiglu_limits"]])
    writer.add_swiglu_clamp_shexp([limit or 0.0 for limit in config["swiglu_limits_shared"]])


def _write_convolutions(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([0 if kind == "conv" else heads for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_dense_layers" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _write_mamba(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads, attention = config["num_key_value_heads"], "full_attention"
    writer.add_head_count_kv([heads if kind == attention else 0 for kind in config["layer_types"]])
    if "shared_intermediate_size" in config:
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    sizes = FAMILIES[config["model_type"]].decoder.mamba
    assert sizes is not None
    mamba = sizes(config)
    writer.add_ssm_conv_kernel(mamba.taps)
    writer.add_ssm_state_size(mamba.states)
    writer.add_ssm_group_count(mamba.groups)
    writer.add_ssm_inner_size(mamba.values)
    writer.add_ssm_time_step_rank(mamba.heads)


def _write_shared(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """What models with a shared expert of several experts' size say of their routing."""
    writer.add_expert_shared_count(config.get("n_shared_experts") or config["num_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        gate = ExpertGatingFuncType.SOFTMAX if config["model_type"] == "mistral4" else ExpertGatingFuncType.SIGMOID
        writer.add_expert_gating_func(gate)
    if config["model_type"] == "nemotron_h":
        return
    dense = config.get("first_k_dense_replace")
    writer.add_leading_dense_block_count(config.get("mlp_layer_types", []).count("dense") if dense is None else dense)


def _write_yarn(writer: GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def add_tokenizer(writer: GGUFWriter, size: int, split: str = "gpt-2", named: Mapping[int, str] | None = None) -> None:
    """Write a vocabulary of ``size`` tokens. ``named``: what tokens that mean nothing are called, by their ids."""
    tokens = ["<|endoftext|>", "<s>", "</s>", *TOKENS]
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    for identity, name in (named or {}).items():
        tokens[identity] = name
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens[:size])
    writer.add_token_types([3 if i < 3 else 1 for i in range(size)])
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in TOKENS if len(token) == 2])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
