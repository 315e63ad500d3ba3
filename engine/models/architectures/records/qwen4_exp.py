"""Qwen3.8-Flash-Next without pictures (transformers' qwen4_exp): delta-nets, attention to chosen blocks, embeddings of
n-grams, and several residual streams."""

from dataclasses import replace
from typing import Any

from engine.errors import damaged, shown
from engine.models.architectures import gguf_delta_net, gguf_streams
from engine.models.architectures.config_values import whole_number
from engine.models.architectures.layer_rules import full_at_intervals
from engine.models.architectures.parts import QWEN
from engine.models.architectures.record import (
    BlockChoice,
    Config,
    DecoderRecord,
    DeltaSizes,
    Family,
    GgufRecord,
    LexicalSizes,
    MoeRecord,
    RouterRecord,
    StreamSizes,
    delta_sizes,
)


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
        channels=_streams(config).count * whole_number(config, "hidden_size"),
        width=whole_number(config, "ple_embed_dim", "hidden_size"),
    )


def _streams(config: Config) -> StreamSizes:
    return StreamSizes(
        whole_number(config, "hc_count", minimum=2, maximum=_MOST_STREAMS), whole_number(config, "hc_lowrank")
    )


def _delta(config: Config) -> DeltaSizes:
    gate = config.get("output_gate_type")
    if gate not in (None, "silu", "sigmoid"):
        raise damaged(f"config.json gives {shown(gate)} for output_gate_type, which must be silu or sigmoid")
    return replace(delta_sizes(config), sigmoid_gates=gate == "sigmoid")


def _blocks(config: Config) -> BlockChoice:
    if config.get("indexer_kv_heads") not in (None, 1):
        raise damaged(f"config.json gives {shown(config['indexer_kv_heads'])} for indexer_kv_heads, which must be 1")
    size, budget = whole_number(config, "indexer_compress_ratio"), whole_number(config, "indexer_budget")
    if budget % size:
        raise damaged(f"config.json gives {budget} for indexer_budget, which must be a multiple of {size}")
    return BlockChoice(
        heads=whole_number(config, "indexer_n_heads"),
        width=whole_number(config, "indexer_head_dim"),
        size=size,
        budget=budget,
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
    "ngram_vocab_size_base": 20_000_000,
    "seed": 1234,
}

FAMILIES = (
    Family(
        "qwen4_exp_text",
        whole="qwen4_exp",
        defaults=_DEFAULTS,
        renamed=_renamed,
        decoder=DecoderRecord(
            mixer="delta-net",
            norms="streams",
            offset_norms=True,
            layer_kind=full_at_intervals,
            head_norm="per-head",
            rotated=1.0,
            index_width="indexer_head_dim",
            lexical=_lexical,
            streams=_streams,
            blocks=_blocks,
            delta=_delta,
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
        gguf=GgufRecord(
            "qwen4exp",
            "Qwen4ExpForCausalLM",
            settings=gguf_streams.settings,
            own_heads=True,
            mixer=gguf_delta_net.layer_shapes,
            mixed_layers="linear_attention",
            further=gguf_streams.tensors,
            changes=gguf_streams.changes,
        ),
        tokenizer_class="Qwen3_5Tokenizer",
        tokenizer_overridden=("qwen4_exp",),
    ),
)
