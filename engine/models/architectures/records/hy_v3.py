"""Hunyuan 3: a layer without experts, then layers whose router is corrected and whose weights are scaled."""

from __future__ import annotations

from typing import Any

from engine.models.architectures.config_values import number_of
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import experts, network_kinds
from engine.models.architectures.layer_rules import sparse_layers
from engine.models.architectures.parts import QWEN, shared_experts
from engine.models.architectures.record import DecoderRecord, Family, GgufRecord, MoeRecord, RouterRecord


def _settings(metadata: Metadata) -> dict[str, Any]:
    layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    width = metadata.number("expert_feed_forward_length")
    return {
        **experts("num_experts")(metadata),
        "num_hidden_layers": layers,
        "moe_intermediate_size": width,
        "num_shared_experts": metadata.number("expert_shared_feed_forward_length", width) // width,
        "router_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
        "mlp_layer_types": network_kinds(metadata, layers),
    }


FAMILIES = (
    Family(
        "hy_v3",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
        },
        decoder=DecoderRecord(
            head_norm="per-head",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            rope_theta=11_158_840.0,
            names={"mlp.shared_experts.": "mlp.shared_mlp."},
        ),
        moe=MoeRecord(
            QWEN,
            RouterRecord(
                ("mlp.router.gate.weight", "mlp.gate.weight"),
                scoring="sigmoid",
                normalise=True,
                added_to_sum=1e-20,
                correction="mlp.expert_bias",
                scale=number_of("router_scaling_factor"),
            ),
            shared="plain",
            shared_ffn=shared_experts("num_shared_experts", least=1),
            layers=sparse_layers(lambda config: 1),
            count_key="num_experts",
            ffn_key="moe_intermediate_size",
        ),
        extra_layers=True,
        gguf=GgufRecord("hy_v3", "HYV3ForCausalLM", settings=_settings),
    ),
)
