"""Names of the tensors of tiny models in GGUF files, as llama.cpp's converter gives them."""

from __future__ import annotations

import functools
from typing import Any

from gguf import MODEL_ARCH_NAMES
from gguf import get_tensor_name_map as gguf_names

from engine.models.architectures.families import FAMILIES
from engine.models.architectures.record import renamed
from tests.support.tiny_gguf_metadata import KIMI_DELTAS, NEMOTRONS

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "model.embedding_norm": "token_embd_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.gate": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "model.hyper_connection_mixer.hc_norm": "output_hc_norm",
    "model.hyper_connection_mixer.input_mix_weight_down": "output_hc_down",
    "model.hyper_connection_mixer.input_mix_weight_up": "output_hc_up",
    "self_attn.indexer.index_qk_proj": "indexer.qk_proj",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query",
    "ple.norm_conv": "ple_norm_conv",
    "ple.conv1d": "ple_conv1d",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_MIXERS = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
BY_GGUF = (
    "gemma4",
    "gemma3",
    "granite",
    "lfm2",
    "smollm3",
    "seed_oss",
    "olmo2",
    "exaone4",
    "mistral3",
    "phi3",
    "glm4",
    "ernie4_5",
    "minimax-m2",
    "dots1",
    "hunyuan-dense",
    "hunyuan-moe",
    "ernie4_5-moe",
    "exaone-moe",
    "command-r",
    "cohere2",
    "llama4",
    "granitehybrid",
    *NEMOTRONS,
    "gemma2",
    "afmoe",
    "mimo2",
    "step35",
    "gemma3n",
    *KIMI_DELTAS,
    "apertus",
    "qwen3vl",
    "qwen3vlmoe",
)
"""Architectures whose names are those of the gguf package, which llama.cpp's converter uses."""
_UNKNOWN_TO_GGUF = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "e_score_correction_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b.bias",
    "attention_sink_bias": "attn_sinks.weight",
    "dt_bias": "ssm_dt.bias",
}
"""Names that the converter makes by itself, by the end of the name of a layer's tensor."""


_DEEPSEEK4 = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.norm": "attn_kv_a_norm",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_a": "attn_q_a",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.shared_experts.w1": "ffn_gate_shexp",
    "ffn.shared_experts.w2": "ffn_down_shexp",
    "ffn.shared_experts.w3": "ffn_up_shexp",
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}
"""Names in published files of DeepSeek V4, and the converter's, both within a layer, and with what follows or not."""


def _deepseek4_name(name: str) -> str:
    if name in _DEEPSEEK4:
        return _DEEPSEEK4[name]
    if name.startswith("model.hc_head."):
        return f"output_{name.rpartition('.')[2]}.weight"
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    if rest in _DEEPSEEK4:
        return f"blk.{layer}.{_DEEPSEEK4[rest]}"
    if stem in _DEEPSEEK4:
        return f"blk.{layer}.{_DEEPSEEK4[stem]}.{kind}"
    if ".compressor." in rest:
        whose = "indexer" if ".indexer." in rest else "attn"
        short = rest.removesuffix(".weight").rpartition(".")[2].removeprefix("w")
        return f"blk.{layer}.{whose}_compressor_{short}.weight"
    assert rest.startswith("hc_"), name
    return f"blk.{layer}.{rest}.weight"


@functools.cache
def _names_of(architecture: str) -> Any:
    known = next(each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf_names(known, 100)


def gguf_name(name: str, architecture: str = "") -> str:
    """The name of a Hugging Face tensor in a GGUF; those of experts are not asked for."""
    if architecture == "bailingmoe3":  # which the gguf package does not know yet
        usual = renamed(name, dict(FAMILIES["bailing_hybrid"].stored_names)).replace(".f_proj.", ".f_a_proj.")
        if usual.endswith(".self_attn.g_proj.weight"):
            return f"blk.{usual.split('.')[2]}.attn_gate.weight"
        return gguf_name(usual, "kimi-linear")
    if architecture == "glm5-next":  # nor this one
        _, _, layer, rest = [*name.split(".", 3), "", ""][:4]
        if rest.startswith("hc_"):
            return f"blk.{layer}.{rest}.weight"
        if ".index_kpool_compress_" in rest:
            return f"blk.{layer}.indexer_compressor_{rest.rpartition('_')[2]}.weight"
        if ".indexer." in rest:
            return gguf_name(name, "glm-dsa")
        return gguf_name(name, "kimi-linear")
    if architecture == "deepseek4":
        return _deepseek4_name(name)
    if architecture in BY_GGUF:
        for ours, theirs in _UNKNOWN_TO_GGUF.items():
            if name.endswith(ours):
                return f"blk.{name.split('.')[2]}.{theirs}"
        found = _names_of(architecture).get_name(name, (".weight", ".bias"))
        assert found is not None, name
        return found
    stem, _, kind = name.rpartition(".")
    if kind in ("A_log", "dt_bias"):
        return f"blk.{stem.split('.')[2]}.{'ssm_a' if kind == 'A_log' else 'ssm_dt.bias'}"
    if kind in ("e_score_correction_bias", "expert_bias"):
        return f"blk.{stem.split('.')[2]}.exp_probs_b" + (".bias" if architecture != "hy_v3" else "")
    if kind == "sinks":
        return f"blk.{stem.split('.')[2]}.attn_sinks.weight"
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    if "hyper_connection" in rest:
        part, _, which = rest.partition(".")
        short = "hc_attn" if part.startswith("attn") else "hc_ffn"
        return f"blk.{layer}.{short}_{_MIXERS[which]}.{kind}"
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"
