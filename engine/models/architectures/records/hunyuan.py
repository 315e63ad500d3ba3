"""Hunyuan, without and with experts: heads are normed after they are rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.parts import QWEN
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)

_NAMES = {
    "self_attn.q_norm": "self_attn.query_layernorm",
    "self_attn.k_norm": "self_attn.key_layernorm",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
"""Parts of the usual names of a checkpoint, and what they are in this family."""


def _settings(metadata: Metadata) -> dict[str, Any]:
    return {"num_experts": metadata.number("expert_count"), "moe_topk": metadata.number("expert_used_count")}


def _unstretched(config: Config) -> str | None:
    """mlx-lm takes every scaling of positions for one by ``alpha``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return f"rope_type {kind!r} without alpha" if kind == "dynamic" and not rope.get("alpha") else None


def _translate(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    stretched = {"type": "dynamic", "factor": 1.0, **rope} if rope.get("rope_type") == "dynamic" else None
    return {"rope_scaling": stretched}


DENSE = Family(
    "hunyuan_v1_dense",
    defaults={"rms_norm_eps": 1e-5},
    decoder=DecoderRecord(
        head_norm="per-head",
        rotated_first=True,
        stretched_base=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        names=_NAMES,
    ),
    gguf=GgufRecord("hunyuan-dense", "HunYuanDenseV1ForCausalLM"),
    mlx=MlxRecord(
        "hunyuan_v1_dense",
        rope_types=frozenset({"default", "dynamic"}),
        honours={"hidden_act": ("silu",), "use_qk_norm": (True,)},
        checks=(_unstretched,),
        translate=_translate,
    ),
)
MOE = replace(
    DENSE,
    model_type="hunyuan_v1_moe",
    moe=MoeRecord(
        QWEN,
        RouterRecord(("mlp.gate.wg.weight", "mlp.gate.weight"), normalise=True),
        shared="plain",
        shared_ffn=lambda config: whole_number(config, "intermediate_size"),
        count_key="num_experts",
        per_token_key="moe_topk",
    ),
    gguf=GgufRecord("hunyuan-moe", "HunYuanMoEV1ForCausalLM", settings=_settings),
    # mlx-lm does not divide the weights of a token's experts by their sum, as transformers and llama.cpp do.
    mlx=None,
)
FAMILIES = (DENSE, MOE)
