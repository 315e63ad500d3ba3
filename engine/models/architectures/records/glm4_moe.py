"""GLM-4.5 and GLM-4.5-Air, and Solar Open, which is GLM with plain heads."""

from dataclasses import replace

from engine.errors import ModelError
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import grouped_experts, rotated_part
from engine.models.architectures.layer_rules import after_dense
from engine.models.architectures.parts import GROUPED, QWEN
from engine.models.architectures.record import DecoderRecord, Family, GgufRecord, MlxRecord, MoeRecord


def _settings(metadata: Metadata) -> dict[str, object]:
    if metadata.get("expert_gating_func", 2) != 2:
        raise ModelError("The GGUF's router is not one of sigmoids, as every glm4moe model's is; use another file.")
    return {
        "num_hidden_layers": metadata.number("block_count") - metadata.number("nextn_predict_layers", 0),
        "attention_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & metadata.file.tensors.keys()),
        "partial_rotary_factor": rotated_part(metadata),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.file.tensors,
        **grouped_experts(metadata, normalised=True),
    }


_MOE = MoeRecord(QWEN, GROUPED, shared="plain", count_key="n_routed_experts", ffn_key="moe_intermediate_size")
GLM = Family(
    "glm4_moe",
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    decoder=DecoderRecord(
        head_norm="per-head", head_norm_setting="use_qk_norm", qkv_bias="attention_bias", rotated=0.5
    ),
    moe=replace(_MOE, layers=after_dense("first_k_dense_replace")),
    extra_layers=True,
    gguf=GgufRecord("glm4moe", "Glm4MoeForCausalLM", settings=_settings, own_heads=True),
    # Of several groups of experts mlx-lm gives those left out the score 0, which may be higher than a chosen one's.
    mlx=MlxRecord(
        "glm4_moe",
        route="own-gate",
        partial_rotary=True,
        honours={"hidden_act": ("silu",), "n_group": (1,)},
    ),
    tokenizer_class="TokenizersBackend",
)
SOLAR = replace(
    GLM,
    model_type="solar_open",
    defaults={**GLM.defaults, "head_dim": 128},
    decoder=DecoderRecord(qkv_bias="attention_bias", rotated=1.0, rope_theta=1_000_000.0),
    moe=_MOE,
    extra_layers=False,
    gguf=None,  # its files are glm4moe
    mlx=MlxRecord(
        "solar_open",
        route="own-gate",
        partial_rotary=True,
        honours={"hidden_act": ("silu",), "n_group": (1,)},
        translate=lambda config: {
            "intermediate_size": config["moe_intermediate_size"],
            "first_k_dense_replace": 0,
            "partial_rotary_factor": (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0),
        },
    ),
    tokenizer_class="",
)
FAMILIES = (GLM, SOLAR)
