"""Qwen 3.5 and 3.6 without pictures, and Qwen3-Next: three of four layers are gated delta-nets."""

from dataclasses import replace
from typing import Any

from engine.models.architectures import gguf_delta_net
from engine.models.architectures.layer_rules import every_sparse_step, full_at_intervals
from engine.models.architectures.parts import QWEN
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


def _regular_delta_nets(config: Config) -> str | None:
    """mlx-lm looks at the interval only."""
    kinds, interval = config.get("layer_types") or (), config.get("full_attention_interval") or 4
    expected = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(len(kinds))]
    return None if list(kinds) == expected else f"layer_types {kinds!r}"


_AHEAD = ("mtp.",)
"""Beginning of the names of what predicts several tokens at once."""
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_DECODER = DecoderRecord(
    mixer="delta-net", offset_norms=True, layer_kind=full_at_intervals, head_norm="per-head", rotated=0.25
)
_MOE = MoeRecord(
    QWEN,
    RouterRecord(("mlp.gate.weight",), normalise=True),
    shared="gated",
    count_key="num_experts",
    ffn_key="moe_intermediate_size",
)
_GGUF = GgufRecord(
    "qwen35",
    "Qwen3_5ForCausalLM",
    settings=gguf_delta_net.settings,
    own_heads=True,
    mixer=gguf_delta_net.layer_shapes,
    mixed_layers="linear_attention",
    changes=gguf_delta_net.changes,
)
_MLX = MlxRecord(
    "qwen3_5",
    classes=("TextModel", "TextModelArgs"),
    rope_types=SCALED_ROPE,
    partial_rotary=True,
    nested_rotary=True,
    checks=(_regular_delta_nets,),
)

DENSE = Family(
    "qwen3_5_text",
    whole="qwen3_5",
    defaults=_DEFAULTS | {"num_key_value_heads": 4},
    decoder=_DECODER,
    unused=_AHEAD,
    gguf=_GGUF,
    mlx=_MLX,
    tokenizer_class="Qwen3_5Tokenizer",
    tokenizer_overridden=("qwen3_5",),
)
MOE = Family(
    "qwen3_5_moe_text",
    whole="qwen3_5_moe",
    defaults=_DEFAULTS | {"num_key_value_heads": 2, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512},
    decoder=_DECODER,
    moe=_MOE,
    unused=_AHEAD,
    gguf=replace(_GGUF, name="qwen35moe", class_name="Qwen3_5MoeForCausalLM", settings=gguf_delta_net.expert_settings),
    # transformers knows no such setting.
    mlx=replace(_MLX, route="last-of-softmax", translate=lambda config: {"norm_topk_prob": True}),
    tokenizer_class="Qwen3_5Tokenizer",
    tokenizer_overridden=("qwen3_5_moe", "qwen3_5_moe_text"),
)
NEXT = Family(
    "qwen3_next",
    defaults=_DEFAULTS
    | {
        "num_key_value_heads": 2,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 512,
    },
    decoder=_DECODER,
    moe=replace(_MOE, router=RouterRecord(("mlp.gate.weight",), normalise="norm_topk_prob"), layers=every_sparse_step),
    unused=_AHEAD,
    gguf=replace(
        _GGUF,
        name="qwen3next",
        class_name="Qwen3NextForCausalLM",
        settings=gguf_delta_net.next_settings,
        mixer=gguf_delta_net.next_layer_shapes,
        changes=gguf_delta_net.next_changes,
    ),
    mlx=MlxRecord(
        "qwen3_next",
        route="last-of-softmax",
        rope_types=SCALED_ROPE,
        partial_rotary=True,
        checks=(_regular_delta_nets,),
    ),
    tokenizer_class="Qwen2Tokenizer",
)
FAMILIES = (DENSE, MOE, NEXT)
