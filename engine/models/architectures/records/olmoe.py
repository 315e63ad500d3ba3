"""OLMoE."""

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import experts
from engine.models.architectures.parts import QWEN
from engine.models.architectures.record import (
    SCALED_ROPE,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)


def _settings(metadata: Metadata) -> dict[str, object]:
    return {
        **experts("num_experts")(metadata),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "clip_qkv": metadata.get("attention.clamp_kqv"),
    }


FAMILIES = (
    Family(
        "olmoe",
        defaults={"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": False},
        decoder=DecoderRecord(head_norm="whole", qkv_bias="attention_bias", output_bias="attention_bias", clip=True),
        moe=MoeRecord(QWEN, RouterRecord(("mlp.gate.weight",), normalise="norm_topk_prob"), count_key="num_experts"),
        gguf=GgufRecord("olmoe", "OlmoeForCausalLM", settings=_settings),
        mlx=MlxRecord(
            "olmoe",
            route="normalised-best-of-softmax",
            rope_types=SCALED_ROPE,
            honours={"hidden_act": ("silu",), "clip_qkv": (None,)},
        ),
        tokenizer_class="GPTNeoXTokenizer",
    ),
)
