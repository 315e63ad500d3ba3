"""Granite 3 and 4, without and with experts."""

from dataclasses import replace

from engine.models.architectures.config_values import number_of, positive_number, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import experts, paired_changes
from engine.models.architectures.parts import GGUF, LAYER, fused, of_mlx
from engine.models.architectures.record import (
    SCALED_ROPE,
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)


def scales(metadata: Metadata) -> dict[str, object]:
    return {
        "attention_multiplier": metadata.short_real("attention.scale", 1.0),
        "embedding_multiplier": metadata.short_real("embedding_scale", 1.0),
        "residual_multiplier": metadata.short_real("residual_scale", 1.0),
        "logits_scaling": metadata.short_real("logit_scale", 1.0),
    }


DEFAULTS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
DECODER = DecoderRecord(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    embedding_scale=number_of("embedding_multiplier"),
    score_scale=lambda config, width: positive_number(config, "attention_multiplier"),
    residual_scale=number_of("residual_multiplier"),
    logits_divisor=number_of("logits_scaling"),
)
LAYOUTS = (
    fused(LAYER + "block_sparse_moe.", "input_linear.weight", "output_linear.weight"),
    fused(LAYER + "block_sparse_moe.experts."),
    of_mlx(LAYER + "block_sparse_moe.switch_mlp"),
    *GGUF,
)
SHARED_NAMES = {
    "mlp.shared_experts.": "shared_mlp.",
    ".mlp.": ".shared_mlp.",
    "shared_mlp.gate_up_proj": "shared_mlp.input_linear",
    "shared_mlp.down_proj": "shared_mlp.output_linear",
}
"""Parts of the usual names of networks that all tokens pass, and what they are beside experts."""


def shared_ffn(config: Config) -> int:
    """Width of that network."""
    return whole_number(config, "shared_intermediate_size", minimum=0)


# A softmax over the chosen logits alone is the whole softmax, divided by the sum of the chosen.
ROUTER = RouterRecord(("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"), normalise=True)
GRANITE = Family(
    "granite",
    defaults=DEFAULTS,
    decoder=replace(DECODER, mlp_bias="mlp_bias"),
    gguf=GgufRecord("granite", "GraniteForCausalLM", settings=scales, paired_rotary=True, changes=paired_changes),
    mlx=MlxRecord("granite", rope_types=SCALED_ROPE, honours={"hidden_act": ("silu",)}),
    tokenizer_class="TokenizersBackend",
)
GRANITE_MOE = Family(
    "granitemoe",
    defaults=DEFAULTS | {"num_experts_per_tok": 2},
    decoder=DECODER,
    moe=MoeRecord(LAYOUTS, ROUTER),
    gguf=GgufRecord(
        "granitemoe",
        "GraniteMoeForCausalLM",
        settings=lambda metadata: experts("num_local_experts")(metadata) | scales(metadata),
        paired_rotary=True,
        changes=paired_changes,
    ),
    mlx=MlxRecord("granitemoe", block="block_sparse_moe", route="own-router", rope_types=SCALED_ROPE),
    tokenizer_class="TokenizersBackend",
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    defaults={**GRANITE_MOE.defaults, "shared_intermediate_size": 0},
    decoder=replace(DECODER, merged_ffn=True, names=SHARED_NAMES),
    moe=MoeRecord(LAYOUTS, ROUTER, shared="plain", shared_ffn=shared_ffn),
    gguf=GgufRecord(
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        when=lambda metadata: metadata.number("expert_shared_feed_forward_length", 0) > 0,
        settings=lambda metadata: {
            **experts("num_local_experts")(metadata),
            **scales(metadata),
            "shared_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        },
        paired_rotary=True,
        changes=paired_changes,
    ),
    mlx=None,
)
FAMILIES = (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED)
