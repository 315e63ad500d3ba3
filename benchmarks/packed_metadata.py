"""The metadata of a packed GGUF file, from a model's configuration."""

from __future__ import annotations

import gguf

from benchmarks.packed_tensors import Config, head_width, layer_kind
from engine.models.architectures.families import FAMILIES, ExpertLayers, expert_shape, stated_experts_per_token

_UNTURNED = 1e30
"""Divisor of a rotary frequency that stands for values that are not rotated."""


def describe(writer: gguf.GGUFWriter, config: Config) -> None:
    """The metadata of ``config``, but for its tokenizer."""
    routed = expert_shape(config, FAMILIES[config["model_type"]])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "kv_lora_rank" in config:
        _describe_latents(writer, config)
    elif "global_head_dim" in config:
        _describe_two_kinds(writer, config)
    else:
        _describe_heads(writer, config)
    if routed is not None:
        _describe_experts(writer, config, routed)
    if "linear_num_key_heads" in config:
        _describe_delta_net(writer, config)
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_vocab_size(config["vocab_size"])


def _describe_heads(writer: gguf.GGUFWriter, config: Config) -> None:
    width, groups = head_width(config), config["num_key_value_heads"]
    kinds = [layer_kind(config, layer) for layer in range(config["num_hidden_layers"])]
    # Convolutions are told from attention by having no heads.
    writer.add_head_count_kv([0 if kind == "conv" else groups for kind in kinds] if "conv" in kinds else groups)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(round(config.get("partial_rotary_factor", 1) * width))


def _describe_latents(writer: gguf.GGUFWriter, config: Config) -> None:
    """What is kept of a token is one head of keys, of which the values are a part."""
    latents, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latents)
    writer.add_key_length(latents + rotated)
    writer.add_value_length(latents)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)


def _describe_two_kinds(writer: gguf.GGUFWriter, config: Config) -> None:
    """Layers with a sliding window and with full attention, whose heads differ."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    narrow, wide = config["head_dim"], config["global_head_dim"]
    counts = config["num_global_key_value_heads"], config["num_key_value_heads"]
    writer.add_head_count_kv([counts[one] for one in slides])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_rope_freq_base_swa(config["rope_theta_sliding"])
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(narrow)
    writer.add_value_length_swa(narrow)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(narrow)


def rotary_divisors(config: Config) -> list[float]:
    """By what the rotary frequencies of layers with full attention are divided."""
    half = config["global_head_dim"] // 2
    turned = round(config["partial_rotary_factor"] * half)
    return [1.0] * turned + [_UNTURNED] * (half - turned)


def _describe_experts(writer: gguf.GGUFWriter, config: Config, routed: ExpertLayers) -> None:
    writer.add_expert_count(routed.count)
    writer.add_expert_used_count(stated_experts_per_token(config) or 1)
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(routed.ffn)
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "n_shared_experts" in config:
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if "n_routed_experts" in config or config.get("use_expert_bias"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(min(routed.layers))


def _describe_delta_net(writer: gguf.GGUFWriter, config: Config) -> None:
    if "mrope_section" in config:
        writer.add_rope_dimension_sections([*config["mrope_section"], 0])
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
