"""Llama 4, with and without the settings and tensors of pictures."""

from dataclasses import replace

from engine.models.architectures.config_values import whole_number
from engine.models.architectures.layer_rules import layer_list
from engine.models.architectures.parts import fused, prepared
from engine.models.architectures.record import Config, Family, MoeRecord

_EXPERTS = "model.layers.{layer}.feed_forward.experts."


def _moe_layers(config: Config, layers: int) -> list[int]:
    listed = layer_list(config, "moe_layers")
    if listed is not None:
        return sorted(set(listed))
    step = whole_number(config, "interleave_moe_layer_step")
    return list(range(step - 1, layers, step))


TEXT = Family(
    "llama4_text",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
    moe=MoeRecord((fused(_EXPERTS, transposed=True), prepared(_EXPERTS)), layers=_moe_layers),
    native=False,
)
WHOLE = replace(
    TEXT,
    model_type="llama4",
    config_section="text_config",
    layers_prefix="language_model.model.layers.",
    moe=MoeRecord(
        (fused("language_model." + _EXPERTS, transposed=True), prepared("language_model." + _EXPERTS)),
        layers=_moe_layers,
    ),
)
FAMILIES = (TEXT, WHOLE)
