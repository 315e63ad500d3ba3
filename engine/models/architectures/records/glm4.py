"""GLM-4-0414, without experts: norms before and after the parts of a layer."""

from __future__ import annotations

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import rotated_part
from engine.models.architectures.record import DecoderRecord, Family, GgufRecord, MlxRecord

_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""Parts of the usual names of a checkpoint, and what they are in this family."""


def _settings(metadata: Metadata) -> dict[str, object]:
    return {
        "attention_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & metadata.file.tensors.keys()),
        "partial_rotary_factor": rotated_part(metadata),
        "pad_token_id": None,
    }


FAMILIES = (
    Family(
        "glm4",
        defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
        decoder=DecoderRecord(
            norms="around",
            names=_NAMES,
            merged_ffn=True,
            paired_rotary=True,
            qkv_bias="attention_bias",
            rotated=0.5,
        ),
        gguf=GgufRecord("glm4", "Glm4ForCausalLM", settings=_settings, own_heads=True),
        mlx=MlxRecord("glm4", partial_rotary=True),
        tokenizer_class="TokenizersBackend",
    ),
)
