"""What a family may be set to on the native trunk, long prompts, threads and instruction sets: transformers' logits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.moe.kernels.bindings import available
from tests.engine.runtimes.native_oracle import PREPARED_ONLY, load_native, needs_kernels
from tests.engine.runtimes.subjects import logits_along, prompt_of
from tests.engine.runtimes.torch_oracle import library_model, library_run, load, our_run, typical, worst
from tests.support.tiny_models import write_tiny_model

pytestmark = needs_kernels

LIMIT = 1e-5
"""Both compute in float32; the order of the sums differs."""


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases, other scores, no limits, long texts in layers that see everything": (
        "step3p5",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "query_pre_attn_scalar": 24,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "rope_scaling": LLAMA3,
        },
    ),
    "two streams that are not scaled, gates half of which count": (
        "gemma3n_text",
        {
            "altup_num_inputs": 2,
            "altup_correct_scale": False,
            "activation_sparsity_pattern": [0.5, 0.0, 0.99, 0.2, 0.0, 0.5],
            "num_kv_shared_layers": 0,
        },
    ),
    "gates of each number": ("laguna", {"gating": "per-element"}),
    "experts by softmax, summed, behind plain norms": (
        "cohere2_moe",
        {"expert_selection_fn": "softmax", "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5},
    ),
    "sinks without shared experts, rotated everywhere": (
        "granitemoe_swa",
        {"shared_intermediate_size": 0, "layer_rope_theta": None},
    ),
    "odd head width, one key/value head": ("llama", {"head_dim": 22, "num_key_value_heads": 1}),
    "a key/value head per head": ("mixtral", {"num_key_value_heads": 6}),
    "head width over a block": ("qwen3", {"head_dim": 72}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "biases of attention with head norms": ("qwen3_moe", {"attention_bias": True}),
    "no biases": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
    "window on late layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "window by layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "window on even layers": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}),
    "window on all layers": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 11}),
    "window of two": ("mistral", {"sliding_window": 2}),
    "no window": ("mistral", {"sliding_window": None}),
    "tied": ("granitemoe", {"tie_word_embeddings": True, "attention_bias": True}),
    "whole norm, biases, grouped": ("olmoe", {"attention_bias": True, "norm_topk_prob": True, "clip_qkv": None}),
    "sparse step": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "yarn, scales given": (
        "mixtral",
        {"head_dim": 8, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "yarn, factor given": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    ),
    "other windows, clamps and no biases of attention": (
        "gpt_oss",
        {
            "attention_bias": False,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.9,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "sinks without yarn": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    "delta-nets last": (
        "qwen3_5_moe_text",
        {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "delta-nets of other widths, a value head per key head": (
        "qwen3_5_text",
        {
            "linear_key_head_dim": 33,
            "linear_value_head_dim": 72,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "a convolution of one token": ("qwen3_5_text", {"linear_conv_kernel_dim": 1, "tie_word_embeddings": True}),
    "yarn on a part of each head": (
        "qwen3_5_moe_text",
        {
            "head_dim": 24,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]},
        },
    ),
    "gated attention that rotates whole heads": (
        "qwen3_5_text",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "latents in another order": ("deepseek_v3", {"rope_interleave": False}),
    "heads of latents in other sizes, ranked queries": (
        "deepseek_v2",
        {"v_head_dim": 14, "qk_nope_head_dim": 10, "q_lora_rank": 9, "topk_method": "greedy"},
    ),
    "weights that are not normalised": ("glm4_moe_lite", {"norm_topk_prob": False, "routed_scaling_factor": 1.7}),
    "no head norms, whole heads rotated": (
        "glm4_moe",
        {
            "use_qk_norm": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    "two of four groups": ("glm4_moe", {"n_group": 4, "topk_group": 2}),
    "longer convolutions, nothing added to scores": (
        "lfm2_moe",
        {"conv_L_cache": 5, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.3},
    ),
    "attention first": (
        "lfm2_moe",
        {"layer_types": ["full_attention", "conv", "conv", "conv"], "num_dense_layers": 0},
    ),
    "values of their own, one key head that sees everything": (
        "gemma4_text",
        {"attention_k_eq_v": False, "num_key_value_heads": 1, "final_logit_softcapping": 3.0},
    ),
    "a window of three, one layer that sees everything": (
        "gemma4_text",
        {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 3},
    ),
    "Mamba-2 layers last, of other widths, a group for each head": (
        "granitemoehybrid",
        {
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "mamba_n_heads": 3,
            "mamba_d_head": 32,
            "mamba_d_state": 33,
            "mamba_n_groups": 3,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
        },
    ),
    "one group of Mamba-2 heads, a convolution of one token, rotated attention": (
        "granitemoehybrid_dense",
        {"mamba_n_groups": 1, "mamba_d_conv": 1, "position_embedding_type": "rope"},
    ),
    "attention in all layers of Granite 4": (
        "granitemoehybrid_dense",
        {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
    ),
    "biases of networks and shared experts, another group of heads for each head": (
        "nemotron_h",
        {"mlp_bias": True, "use_conv_bias": False, "n_groups": 6, "norm_topk_prob": False, "topk_group": 2},
    ),
    "experts first, a network last": (
        "nemotron_h",
        {"layer_types": ["moe", "full_attention", "linear_attention", "moe", "mlp"], "num_key_value_heads": 1},
    ),
    "wide latents of experts, of which the last layer has some": (
        "nemotron_h_latents",
        {"moe_latent_size": 200, "layer_types": ["moe", "linear_attention", "full_attention", "moe", "moe"]},
    ),
    "attention last": ("nemotron_h", {"layer_types": ["mlp", "linear_attention", "moe", "full_attention"]}),
    "delta-nets by key head": ("qwen3_next", {"linear_num_value_heads": 2, "norm_topk_prob": False}),
    "biases of all matrices of Seed-OSS": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "biases of queries and keys that are values, and of what attention gives": (
        "gemma4_dense",
        {"attention_bias": True},
    ),
    "no layer sees a window, all heads are rotated": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "layers with windows do not rotate their heads": ("smollm3", {"use_sliding_window": True, "sliding_window": 9}),
    "no limits, biases of attention": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "limited logits, other scores": ("gemma3_text", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 21}),
    "values wider than keys, as they are, biases, and groups of experts": (
        "mimo_v2_flash",
        {"v_head_dim": 40, "attention_value_scale": None, "attention_bias": True, "n_group": 4, "topk_group": 2},
    ),
    "narrow values in layers that all see a window": (
        "mimo_v2_flash",
        {"v_head_dim": 6, "sliding_window": 5, "layer_types": ["sliding_attention"] * 4},
    ),
    "widths of convolutions' networks as they are": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "no shared experts, experts in every second layer": (
        "ernie4_5_moe",
        {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_start_index": 0},
    ),
    "heads normed after they are rotated, without another base": (
        "hunyuan_v1_moe",
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "biases of attention beside the network": ("cohere", {"attention_bias": True, "logit_scale": 2.0}),
    "a window of five, the first layer sees everything": (
        "cohere2",
        {
            "attention_bias": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 4,
        },
    ),
    "chunks of seven, two experts for a token": (
        "llama4_text",
        {
            "attention_chunk_size": 7,
            "floor_scale": 5,
            "num_experts_per_tok": 2,
            "no_rope_layers": [0, 1, 1, 1],
            "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0},
        },
    ),
    "no norms of heads, queries that do not grow": (
        "llama4_text",
        {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True, "moe_layers": [0, 2]},
    ),
    "two streams, pairs of tokens, all text within the budget": (
        "qwen4_exp_text",
        {
            "hc_count": 2,
            "hc_lowrank": 60,
            "ple_layer_ids": [1, 3],
            "ngram_size": 2,
            "heads_per_ngram": 3,
            "ple_conv_kernel_size": 4,
            "indexer_budget": 400,
            "output_gate_type": None,
        },
    ),
    "no n-grams, single tokens chosen, an indexer wider than heads": (
        "qwen4_exp_text",
        {"ple_layer_ids": [], "indexer_compress_ratio": 1, "indexer_head_dim": 24, "indexer_budget": 5},
    ),
    "attention last and next to last, long blocks, n-grams of four tokens": (
        "qwen4_exp_text",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "ple_layer_ids": [3],
            "ngram_size": 4,
            "indexer_compress_ratio": 9,
            "indexer_budget": 18,
            "norm_topk_prob": False,
        },
    ),
    "another activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "many experts": ("mixtral", {"num_local_experts": 40, "num_experts_per_tok": 6}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_library(name: str, tmp_path: Path, prepared: Callable[[Path], Path]) -> None:
    family, options = VARIANTS[name]
    folder = write_tiny_model(tmp_path / "model", family, **options)
    model = load_native(prepared(folder) if family in PREPARED_ONLY else folder, cpu_threads=1)
    tokens = prompt_of(37)
    answer, theirs = library_run(folder, tokens, chunks=1)
    for chunks in (1, 4):
        ours = our_run(model, tokens, chunks, answer)
        assert worst(ours, theirs) < 3 * LIMIT
        assert [int(logits.argmax()) for logits in ours] == answer


@pytest.mark.sampled
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral", "qwen2_moe", "gpt_oss", "qwen3_5_moe_text", "deepseek_v3", "lfm2_moe", "gemma4_text"),
        *("granitemoehybrid", "nemotron_h", "gemma2", "laguna", "qwen4_exp_text"),
    ],
)
def test_a_prompt_over_several_pieces_pages_and_score_tiles(
    family: str, tmp_path: Path, prepared: Callable[[Path], Path]
) -> None:
    folder = write_tiny_model(tmp_path / "model", family, max_position_embeddings=2048)
    model = load_native(prepared(folder) if family in PREPARED_ONLY else folder)
    tokens = prompt_of(1100)
    answer, theirs = library_run(folder, tokens, chunks=1)
    for chunks in (1, 7):
        assert worst(our_run(model, tokens, chunks, answer), theirs) < 10 * LIMIT


def test_a_layer_may_have_attention_or_a_network_alone(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama", attention_bias=True)
    tokens = prompt_of(21)
    library = AutoModelForCausalLM.from_pretrained(folder).eval()
    _, network, attention = library.model.layers
    network.self_attn.forward = lambda hidden_states, **options: (torch.zeros_like(hidden_states), None)
    network.post_attention_layernorm = network.input_layernorm
    attention.mlp.forward = torch.zeros_like
    with torch.inference_mode():
        whole = library(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    model = load_native(folder)
    assert model._weights is not None
    _, network, attention = model._weights.trunk.layers[:3]
    network.output.data = network.key.data = None
    attention.experts = None
    for first in (1, 17):
        assert worst(logits_along(model, tokens, first), list(whole[first - 1 :])) < LIMIT


def test_steps_of_mamba_layers_are_limited(tmp_path: Path) -> None:
    """The library limits those of prompts only."""
    limits = [0.6, 0.9]
    folder = write_tiny_model(tmp_path / "model", "granitemoehybrid", time_step_limit=limits)
    tokens = prompt_of(21)
    with torch.inference_mode():
        whole = library_model(folder)(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    ours = logits_along(load_native(folder), tokens, 17)
    assert worst(ours, list(whole[16:])) < LIMIT
    free = logits_along(load_native(write_tiny_model(tmp_path / "free", "granitemoehybrid")), tokens, 17)
    assert worst(free, list(whole[16:])) > 0.1


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limits", [None, [0.0, 50.0]], ids=["free", "limited"])
def test_steps_of_mamba_layers_that_are_no_numbers_stay_so(
    bias: float, limits: list[float] | None, tmp_path: Path
) -> None:
    """The library limits those of prompts only, which makes numbers of some."""
    options = {} if limits is None else {"time_step_limit": limits}
    folder = write_tiny_model(tmp_path / "model", "granitemoehybrid", **options)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mamba.dt_bias"][1] = bias
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = prompt_of(21)
    with torch.inference_mode():
        whole = library_model(folder)(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    ours = logits_along(load_native(folder), tokens, 17)
    if bias == -math.inf or (limits is not None and bias == math.inf):
        assert worst(ours, list(whole[16:])) < LIMIT
    else:
        assert np.isnan(ours).all() and np.isnan(whole[16:]).all()


@pytest.mark.parametrize("kinds", ["letters", "words"])
def test_layers_of_nemotron_may_be_named_as_they_once_were(kinds: str, tmp_path: Path) -> None:
    folder, tokens = write_tiny_model(tmp_path / "model", "nemotron_h"), prompt_of(21)
    answer, theirs = library_run(folder, tokens, chunks=1)
    config = json.loads((folder / "config.json").read_text())
    named = config.pop("layers_block_type")
    letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
    if kinds == "letters":
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in named)
    else:
        words = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layers_block_type"] = [words.get(kind, kind) for kind in named]
    (folder / "config.json").write_text(json.dumps(config))
    for model in (load_native(folder), load(folder)):
        assert worst(our_run(model, tokens, 2, answer), theirs) < 3 * LIMIT


@pytest.mark.parametrize("threads", [1, 5])
def test_any_number_of_threads_gives_the_same(threads: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen2_moe")
    one, other = load_native(folder, cpu_threads=1), load_native(folder, cpu_threads=threads)
    tokens = prompt_of(60)
    assert worst([other.start().extend(tokens)], [one.start().extend(tokens)]) < LIMIT
    assert other.facts.trunk.endswith(f", {threads} thread{'s' if threads > 1 else ''})")


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize(("family", "biases"), [("llama", True), ("mixtral", False)])
def test_float16_weights_are_those_of_the_library_in_float32(
    instructions: str, family: str, biases: bool, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the rounding of float32; in bfloat16, which only the cache and attention are in, to the rounding of that."""
    options = {"attention_bias": True, "mlp_bias": True} if biases else {}
    folder, tokens = tiny_model(family, dtype="float16", **options), prompt_of(27)
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    answer, theirs = library_run(folder, tokens, chunks=1, dtype="float32")
    assert worst(our_run(load_native(folder, dtype="float32"), tokens, 1, answer), theirs) < LIMIT
    assert typical(our_run(load_native(folder), tokens, 1, answer), theirs) < 1e-2


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_on_every_instruction_set(
    instructions: str, dtype: str, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More heads than a task takes, over several chunks of a row. In bfloat16, as the cache is, to its rounding."""
    folder = tiny_model("glm4_moe_lite", num_attention_heads=19, num_key_value_heads=19, dtype=dtype)
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    tokens = prompt_of(290)
    answer, theirs = library_run(folder, tokens, chunks=1, dtype="float32")
    ours = our_run(load_native(folder), tokens, 2, answer)
    if dtype == "float32":
        assert worst(ours, theirs) < LIMIT
    assert typical(ours, theirs) < 1e-2


@pytest.mark.sampled
@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize(
    "family",
    [
        "mistral",
        "mixtral",
        "gpt_oss",
        "qwen3_5_text",
        "qwen4_exp_text",
        "glm4_moe",
        "lfm2_moe",
        "gemma4_text",
        "granitemoehybrid",
        "nemotron_h",
        "kimi_linear",
        "bailing_hybrid",
        "gemma2",
        "laguna",
    ],
)
def test_every_instruction_set_gives_the_same(
    instructions: str,
    family: str,
    tiny_model: Callable[..., Path],
    prepared: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, tokens = tiny_model(family, head_dim=20), prompt_of(27)
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    runs = "avx512f" if instructions == "avx512_bf16" else instructions  # in float32
    model = load_native(prepared(folder) if family in PREPARED_ONLY else folder)
    assert model.facts.trunk.startswith(f"native ({runs}, ")
    answer, theirs = library_run(folder, tokens, chunks=1)
    assert worst(our_run(model, tokens, 1, answer), theirs) < LIMIT
