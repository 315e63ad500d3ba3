"""MiniMax-M2."""

from __future__ import annotations

from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.gguf_parts import experts, rotated_part
from engine.models.architectures.parts import MIXTRAL
from engine.models.architectures.record import (
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
)


def _settings(metadata: Metadata) -> dict[str, object]:
    return {**experts("num_local_experts")(metadata), "partial_rotary_factor": rotated_part(metadata)}


def _translate(config: Config) -> dict[str, object]:
    rope, width = config.get("rope_parameters") or {}, whole_number(config, "head_dim")
    return {
        "rotary_dim": int(width * min(rope.get("partial_rotary_factor") or 1.0, 1.0)),
        "shared_intermediate_size": 0,
    }


FAMILIES = (
    Family(
        "minimax_m2",
        defaults={"head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 8},
        decoder=DecoderRecord(head_norm="whole", rotated=1.0, rope_theta=5_000_000.0),
        moe=MoeRecord(
            MIXTRAL,
            RouterRecord(
                ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
                scoring="sigmoid",
                normalise=True,
                correction="block_sparse_moe.e_score_correction_bias",
            ),
        ),
        gguf=GgufRecord("minimax-m2", "MiniMaxM2ForCausalLM", settings=_settings, own_heads=True),
        mlx=MlxRecord(
            "minimax",
            block="block_sparse_moe",
            route="best-of-corrected-sigmoids",
            partial_rotary=True,
            translate=_translate,
        ),
        tokenizer_class="TokenizersBackend",
        tokenizer_overridden=("minimax_m2",),
    ),
)
