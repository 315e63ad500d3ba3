"""Qwen3.8-Flash-Next without pictures (transformers' qwen4_exp): delta-nets, attention to chosen blocks, embeddings of
n-grams, and several residual streams."""

from typing import Any

from engine.errors import damaged, shown
from engine.models.architectures.config_values import whole_number
from engine.models.architectures.layer_rules import full_at_intervals
from engine.models.architectures.parts import QWEN
from engine.models.architectures.record import Config, DecoderRecord, Family, LexicalSizes, MoeRecord, RouterRecord


def _renamed(config: Config) -> Config:
    """transformers names layers with attention by their indexer, and published files do not."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return {}
    return {"layer_types": ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]}


_MOST_TOKENS, _MOST_STREAMS = 64, 64
"""Largest n-gram, and largest number of residual streams, that is taken for one."""


def _lexical(config: Config) -> LexicalSizes | None:
    layers = config["ple_layer_ids"]
    if not isinstance(layers, list) or not all(isinstance(layer, int) and layer > 0 for layer in layers):
        raise damaged(f"config.json gives {shown(layers)} for ple_layer_ids, which must be numbers of layers")
    if not layers:
        return None
    return LexicalSizes(
        layers=tuple(sorted({layer - 1 for layer in layers})),
        tokens=whole_number(config, "ngram_size", minimum=2, maximum=_MOST_TOKENS),
        taps=whole_number(config, "ple_conv_kernel_size", maximum=_MOST_TOKENS),
        channels=whole_number(config, "hc_count", minimum=2, maximum=_MOST_STREAMS)
        * whole_number(config, "hidden_size"),
    )


_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [],
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
}

FAMILIES = (
    Family(
        "qwen4_exp_text",
        whole="qwen4_exp",
        defaults=_DEFAULTS,
        renamed=_renamed,
        decoder=DecoderRecord(
            mixer="delta-net",
            offset_norms=True,
            layer_kind=full_at_intervals,
            head_norm="per-head",
            rotated=0.25,
            index_width="indexer_head_dim",
            lexical=_lexical,
        ),
        moe=MoeRecord(
            QWEN,
            RouterRecord(("mlp.gate.weight",), normalise="norm_topk_prob"),
            shared="gated",
            count_key="num_experts",
            ffn_key="moe_intermediate_size",
        ),
        unused=("mtp.",),
        tables=(".ngram_embedding.",),
        native=False,
        tokenizer_class="Qwen3_5Tokenizer",
        tokenizer_overridden=("qwen4_exp",),
    ),
)
