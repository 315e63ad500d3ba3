"""DeepSeek V4: attention to a window and to compressed keys of all before it, residual streams that are mixed by doubly
stochastic matrices, and first layers whose experts a table of tokens chooses."""

from __future__ import annotations

from typing import Any

from engine.errors import damaged, shown
from engine.models.architectures.config_values import setting, whole_number
from engine.models.architectures.layer_rules import check_kinds
from engine.models.architectures.parts import FUSED_MLP, GGUF, MLP_EXPERTS, per_expert
from engine.models.architectures.record import CompressedKeys, Config, DecoderRecord, Family, MoeRecord

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SLIDING: 0, _SPARSE: 4, _HEAVY: 128}
"""Kinds of layers, and the tokens that a compressed key of each stands for, unless the settings say it."""


def _renamed(config: Config) -> dict[str, Any]:
    """Published files give the tokens of a compressed key for each layer, and may do so for those of multi-token
    prediction, too."""
    ratios = config.get("compress_ratios")
    if ratios is None or config.get("layer_types") is not None:
        return {}
    kinds = {rate: kind for kind, rate in _RATES.items()}
    if not isinstance(ratios, list) or any(type(ratio) is not int or ratio not in kinds for ratio in ratios):
        known = ", ".join(map(str, kinds))
        raise damaged(f"config.json gives {shown(ratios)} for compress_ratios, which must be {known} for each layer")
    return {"layer_types": [kinds[ratio] for ratio in ratios[: whole_number(config, "num_hidden_layers")]]}


def _kind(config: Config, layer: int) -> str:
    return _SPARSE if layer > 1 and layer % 2 else _HEAVY


def _compressed(config: Config, layers: int) -> list[CompressedKeys]:
    named = config.get("layer_types") or [_kind(config, layer) for layer in range(layers)]
    width, index = whole_number(config, "head_dim"), whole_number(config, "index_head_dim")
    keys = []
    for kind in check_kinds(named, layers, tuple(_RATES)):
        stated = setting(config, f"compress_rates.{kind}")
        rate = whole_number(config, f"compress_rates.{kind}") if stated is not None else _RATES[kind]
        keys.append(CompressedKeys(rate if kind != _SLIDING else 0, width, index if kind == _SPARSE else 0))
    return keys


FAMILIES = (
    Family(
        "deepseek_v4",
        defaults={
            "head_dim": 512,
            "q_lora_rank": 1024,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "sliding_window": 128,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 512,
            "max_position_embeddings": 1048576,
        },
        renamed=_renamed,
        stored_starts=(
            ("layers.", "model.layers."),
            ("embed.", "model.embed_tokens."),
            ("head.", "lm_head."),
            ("norm.", "model.norm."),
            ("hc_head_", "model.hc_head.hc_"),
        ),
        stored_names=(
            (".attn.norm.", ".attn.kv_norm."),
            (".attn.q_norm.", ".attn.q_a_norm."),
            (".attn.attn_sink", ".attn.sinks"),
            (".attn.indexer.compressor.", ".attn.compressor.indexer."),
            (".attn.indexer.weights_proj.", ".attn.compressor.indexer.scorer.weights_proj."),
            (".attn.indexer.wq_b.", ".attn.compressor.indexer.q_b_proj."),
            (".compressor.norm.", ".compressor.kv_norm."),
            (".compressor.indexer.norm.", ".compressor.indexer.kv_norm."),
            (".ape", ".position_bias"),
            (".wq_a.", ".q_a_proj."),
            (".wq_b.", ".q_b_proj."),
            (".wkv.", ".kv_proj."),
            (".wgate.", ".gate_proj."),
            (".wo_a.", ".o_a_proj."),
            (".wo_b.", ".o_b_proj."),
            (".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"),
            (".shared_experts.w1.", ".shared_experts.gate_proj."),
            (".shared_experts.w2.", ".shared_experts.down_proj."),
            (".shared_experts.w3.", ".shared_experts.up_proj."),
            (".attn_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."),
            (".hc_attn_", ".attn_hc."),
            (".hc_ffn_", ".ffn_hc."),
            (".attn.", ".self_attn."),
            (".ffn.", ".mlp."),
        ),
        decoder=DecoderRecord(layer_kind=_kind, compressed=_compressed),
        moe=MoeRecord(
            (per_expert(MLP_EXPERTS, "w1", "w3", "w2"), FUSED_MLP, *GGUF),
            shared="plain",
            count_key="n_routed_experts",
            ffn_key="moe_intermediate_size",
        ),
        extra_layers=True,
        unused=("mtp.",),
        native=False,
    ),
)
