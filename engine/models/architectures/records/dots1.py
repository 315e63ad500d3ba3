"""dots.llm1."""

from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import grouped_experts
from engine.models.architectures.layer_rules import after_dense, late_windows
from engine.models.architectures.parts import GROUPED, MLP_EXPERTS, QWEN, of_mlx
from engine.models.architectures.record import DecoderRecord, Family, GgufRecord, MlxRecord, MoeRecord


def _settings(metadata: Metadata) -> dict[str, object]:
    layers = metadata.number("block_count")
    return {"layer_types": ["full_attention"] * layers, **grouped_experts(metadata, normalised=True)}


FAMILIES = (
    Family(
        "dots1",
        defaults={
            "num_key_value_heads": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        decoder=DecoderRecord(
            windows=late_windows(),
            head_norm="per-head",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
        ),
        moe=MoeRecord(
            (*QWEN, of_mlx(MLP_EXPERTS)),
            GROUPED,
            shared="plain",
            layers=after_dense("first_k_dense_replace"),
            count_key="n_routed_experts",
            ffn_key="moe_intermediate_size",
        ),
        gguf=GgufRecord("dots1", "Dots1ForCausalLM", settings=_settings),
        # Of several groups of experts mlx-lm gives those left out the score 0, which may be higher than a chosen one's.
        mlx=MlxRecord("dots1", experts="experts", route="own-gate", honours={"hidden_act": ("silu",), "n_group": (1,)}),
    ),
)
