"""ERNIE 4.5, without and with experts: a rotation turns neighbouring values of a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.parts import QWEN, shared_experts
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)


def _moe_layers(config: Config, layers: int) -> list[int]:
    """Every ``moe_layer_interval``-th layer from ``moe_layer_start_index`` to ``moe_layer_end_index``."""
    first, every = whole_number(config, "moe_layer_start_index", minimum=0), whole_number(config, "moe_layer_interval")
    last = whole_number(config, "moe_layer_end_index", default=-1, minimum=-1)
    return [i for i in range(first, layers if last == -1 else min(last + 1, layers)) if (i + 1) % every == 0]


def _settings(metadata: Metadata) -> dict[str, Any]:
    return {
        "use_bias": False,
        "moe_num_experts": metadata.number("expert_count"),
        "moe_k": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "moe_num_shared_experts": metadata.number("expert_shared_count", 0),
        "moe_layer_start_index": metadata.number("leading_dense_block_count", 0),
        "moe_layer_interval": metadata.number("interleave_moe_layer_step", 1),
        "moe_layer_end_index": metadata.number("block_count") - 1,
    }


DENSE = Family(
    "ernie4_5",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    decoder=DecoderRecord(
        paired_rotary=True,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        rope_theta=500_000.0,
    ),
    gguf=GgufRecord("ernie4_5", "Ernie4_5ForCausalLM", settings=lambda metadata: {"use_bias": False}),
    mlx=MlxRecord("ernie4_5"),
    tokenizer_class="TokenizersBackend",
    tokenizer_overridden=("ernie4_5",),
)
MOE = replace(
    DENSE,
    model_type="ernie4_5_moe",
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    moe=MoeRecord(
        QWEN,
        RouterRecord(
            ("mlp.gate.weight",),
            normalise=True,
            least_sum="moe_norm_min",
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_of_one_row=True,
        ),
        shared="plain",
        shared_ffn=shared_experts("moe_num_shared_experts"),
        layers=_moe_layers,
        count_key="moe_num_experts",
        per_token_key="moe_k",
        ffn_key="moe_intermediate_size",
    ),
    unused=("model.mtp_",),
    gguf=GgufRecord("ernie4_5-moe", "Ernie4_5_MoeForCausalLM", settings=_settings),
    # mlx-lm leaves out what is added to the scores where experts are chosen.
    mlx=None,
    tokenizer_overridden=("ernie4_5_moe",),
)
FAMILIES = (DENSE, MOE)
