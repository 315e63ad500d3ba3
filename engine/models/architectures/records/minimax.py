"""MiniMax-Text-01, every second layer of which keeps one matrix of state."""

from engine.models.architectures.parts import MIXTRAL
from engine.models.architectures.record import DecoderRecord, Family, MoeRecord

FAMILIES = (
    Family(
        "minimax",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        decoder=DecoderRecord(
            mixer="lightning",
            layer_kind=lambda config, layer: "linear_attention" if layer % 2 else "full_attention",
        ),
        moe=MoeRecord(MIXTRAL),
        native=False,
    ),
)
