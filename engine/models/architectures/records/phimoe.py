"""Phi-3.5-MoE."""

from engine.models.architectures.parts import MIXTRAL
from engine.models.architectures.record import Family, MlxRecord, MoeRecord

FAMILIES = (
    Family(
        "phimoe",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        moe=MoeRecord(MIXTRAL),
        native=False,
        mlx=MlxRecord(
            "phimoe",
            block="block_sparse_moe",
            route="sparsemixer",
            honours={
                "hidden_act": ("silu",),
                "attention_bias": (True,),
                "lm_head_bias": (True,),
                "tie_word_embeddings": (False,),
            },
            read_elsewhere=False,
        ),
        tokenizer_class="TokenizersBackend",
        tokenizer_overridden=("phimoe",),
    ),
)
