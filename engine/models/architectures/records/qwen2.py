"""Qwen 2 and 2.5, without and with experts."""

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import qwen_experts
from engine.models.architectures.layer_rules import early_even_windows, every_sparse_step, late_windows
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

_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def _settings(metadata: Metadata) -> dict[str, object]:
    return {
        **qwen_experts(metadata, normalised=False),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        "qkv_bias": True,
    }


QWEN2 = Family(
    "qwen2",
    defaults=_WINDOWS | {"num_key_value_heads": 32},
    decoder=DecoderRecord(windows=late_windows("use_sliding_window"), qkv_bias=True),
    gguf=GgufRecord("qwen2", "Qwen2ForCausalLM"),
    mlx=MlxRecord("qwen2", rope_types=SCALED_ROPE),
    tokenizer_class="Qwen2Tokenizer",
    tokenizer_overridden=("qwen2",),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    defaults=_WINDOWS
    | {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 5632,
    },
    decoder=DecoderRecord(windows=early_even_windows, qkv_bias="qkv_bias"),
    moe=MoeRecord(
        QWEN,
        RouterRecord(("mlp.gate.weight",), normalise="norm_topk_prob"),
        shared="gated",
        layers=every_sparse_step,
        count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    gguf=GgufRecord("qwen2moe", "Qwen2MoeForCausalLM", settings=_settings),
    mlx=MlxRecord(
        "qwen2_moe",
        route="best-of-softmax",
        honours={
            "hidden_act": ("silu",),
            "norm_topk_prob": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
            "qkv_bias": (True,),
            "tie_word_embeddings": (False,),
        },
    ),
    tokenizer_class="Qwen2Tokenizer",
)
FAMILIES = (QWEN2, QWEN2_MOE)
