"""GLM-4.5 and GLM-4.5-Air."""

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
        "attention_bias": True,
        "partial_rotary_factor": rotated_part(metadata),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.file.tensors,
        **grouped_experts(metadata, normalised=True),
    }


FAMILIES = (
    Family(
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
        moe=MoeRecord(
            QWEN,
            GROUPED,
            shared="plain",
            layers=after_dense("first_k_dense_replace"),
            count_key="n_routed_experts",
            ffn_key="moe_intermediate_size",
        ),
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
    ),
)
