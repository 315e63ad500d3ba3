"""gpt-oss, whose experts are transposed, interleaved and biased, or packed in MXFP4 as they are published."""

from engine.errors import ModelError, shown
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import experts
from engine.models.architectures.layer_rules import even_windows
from engine.models.architectures.parts import GGUF_MATRICES, LAYER, MLP_EXPERTS, biases, of_mlx, prepared
from engine.models.architectures.record import (
    SCALED_ROPE,
    DecoderRecord,
    ExpertTensor,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)

_BIASES = (
    ExpertTensor(f"{MLP_EXPERTS}.gate_up_proj_bias", ("gate_bias", "up_bias"), "stacked", interleaved=True),
    ExpertTensor(f"{MLP_EXPERTS}.down_proj_bias", ("down_bias",), "stacked"),
)
_LAYOUTS = (
    (
        ExpertTensor(f"{MLP_EXPERTS}.gate_up_proj", ("gate", "up"), "stacked", transposed=True, interleaved=True),
        ExpertTensor(f"{MLP_EXPERTS}.down_proj", ("down",), "stacked", transposed=True),
        *_BIASES,
    ),
    (
        ExpertTensor(f"{MLP_EXPERTS}.gate_up_proj_blocks", ("gate", "up"), "stacked", interleaved=True),
        ExpertTensor(f"{MLP_EXPERTS}.down_proj_blocks", ("down",), "stacked"),
        *_BIASES,
    ),
    (*of_mlx(MLP_EXPERTS), *biases(MLP_EXPERTS + ".{}_proj.bias")),
    (*prepared(MLP_EXPERTS + "."), *biases(MLP_EXPERTS + ".{}_proj.bias")),
    (*GGUF_MATRICES, *biases(LAYER + "ffn_{}_exps.bias")),
)


def _settings(metadata: Metadata) -> dict[str, object]:
    slides = [layer % 2 == 0 for layer in range(metadata.number("block_count"))]
    pattern = metadata.get("attention.sliding_window_pattern", 2)
    if pattern not in (2, slides):
        raise ModelError(
            f"The GGUF gives {shown(pattern)} for the layers with a sliding window, which must be every second of a "
            "gpt-oss model; use another file of this model."
        )
    return {
        **experts("num_local_experts")(metadata),
        "intermediate_size": metadata.number("expert_feed_forward_length"),
        "sliding_window": metadata.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "attention_bias": True,
    }


FAMILIES = (
    Family(
        "gpt_oss",
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
        },
        decoder=DecoderRecord(
            windows=even_windows,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            sinks=lambda config, kind: True,
            rope_theta=150_000.0,
            rope={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        moe=MoeRecord(
            _LAYOUTS,
            # A softmax over the chosen logits alone is the whole softmax, divided by the sum of the chosen.
            RouterRecord(("mlp.router.weight",), bias=True, normalise=True),
            activation="clamped",
            published_mxfp4=True,
        ),
        gguf=GgufRecord("gpt-oss", "GptOssForCausalLM", settings=_settings, yarn=lambda metadata: {"truncate": False}),
        mlx=MlxRecord(
            "gpt_oss",
            experts="experts",
            route="softmax-of-last",
            rope_types=SCALED_ROPE,
            windowed=True,
            honours={
                "swiglu_limit": (7.0,),
                "swiglu_alpha": (1.702,),
                "attention_bias": (True,),
                "tie_word_embeddings": (False,),
            },
        ),
    ),
)
