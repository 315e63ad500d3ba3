"""ERNIE 4.5, without experts: a rotation turns neighbouring values of a head."""

from engine.models.architectures.record import DecoderRecord, Family, GgufRecord, MlxRecord

FAMILIES = (
    Family(
        "ernie4_5",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        decoder=DecoderRecord(
            paired_rotary=True,
            qkv_bias="use_bias",
            output_bias="use_bias",
            mlp_bias="use_bias",
            rope_theta=500_000.0,
        ),
        gguf=GgufRecord("ernie4_5", "Ernie4_5ForCausalLM", settings=lambda metadata: {"use_bias": False}),
        mlx=MlxRecord("ernie4_5"),
        tokenizer_class="TokenizersBackend",
        tokenizer_overridden=("ernie4_5",),
    ),
)
