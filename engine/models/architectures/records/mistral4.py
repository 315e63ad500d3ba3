"""Mistral 4, whose attention is over latents, and whose queries grow with their positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.architectures import gguf_latent
from engine.models.architectures.config_values import number_of
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.layer_rules import growing_queries
from engine.models.architectures.parts import LATENTS
from engine.models.architectures.record import (
    SCALED_ROPE,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    RouterRecord,
)
from engine.models.architectures.records.deepseek import MOE

_ROPE = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _settings(metadata: Metadata) -> dict[str, Any]:
    """transformers' heads of this family have the numbers that are not rotated, too."""
    found = gguf_latent.settings(metadata)
    return {**found, "head_dim": found["qk_nope_head_dim"] + found["qk_rope_head_dim"]}


def _yarn(metadata: Metadata) -> dict[str, Any]:
    """Raises ModelError if queries grow after other steps than positions are scaled by."""
    step = metadata.number("rope.scaling.original_context_length")
    if metadata.number("attention.temperature_length", step) != step:
        raise ModelError(
            f"{metadata.file.path} lets queries grow every {metadata.get('attention.temperature_length')} tokens, and "
            f"was trained with {step}, which no model of mistral4 does; use another file of this model."
        )
    heads = _settings(metadata)
    return {
        **gguf_latent.yarn(metadata),
        "llama_4_scaling_beta": metadata.short_real("attention.temperature_scale", 0.0),
        "partial_rotary_factor": heads["qk_rope_head_dim"] / heads["head_dim"],
    }


FAMILIES = (
    Family(
        "mistral4",
        whole="mistral3",
        defaults={
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
        },
        decoder=DecoderRecord(
            latents=True,
            interleaving_setting="rope_interleave",
            rotated=0.5,
            rope=_ROPE,
            query_growth=growing_queries(_ROPE),
        ),
        moe=replace(
            MOE,
            router=RouterRecord(
                ("mlp.gate.weight",),
                normalise="norm_topk_prob",
                groups=2,
                scale=number_of("routed_scaling_factor"),
            ),
        ),
        gguf=GgufRecord(
            "mistral4",
            "Mistral4ForCausalLM",
            when=lambda metadata: not gguf_latent.scores_by_sigmoid(metadata),
            settings=_settings,
            own_heads=True,
            yarn=_yarn,
        ),
        mlx=MlxRecord(
            "mistral4",
            route="best-of-grouped-softmax",
            rope_types=SCALED_ROPE,
            partial_rotary=True,
            nested_rotary=True,
            honours={"hidden_act": ("silu",), "attention_bias": (False,)},
            stored_names=LATENTS,
        ),
        tokenizer_class="TokenizersBackend",
    ),
)
