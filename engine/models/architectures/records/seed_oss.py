"""Seed-OSS."""

from engine.models.architectures.record import SCALED_ROPE, DecoderRecord, Family, GgufRecord, MlxRecord

FAMILIES = (
    Family(
        "seed_oss",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        decoder=DecoderRecord(qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias"),
        gguf=GgufRecord("seed_oss", "SeedOssForCausalLM", settings=lambda metadata: {"attention_bias": True}),
        mlx=MlxRecord("seed_oss", rope_types=SCALED_ROPE, honours={"hidden_act": ("silu",)}),
    ),
)
