"""Mixtral. Its GGUF files call themselves llama and count experts."""

from engine.models.architectures.gguf_parts import experts, paired_changes
from engine.models.architectures.layer_rules import one_window
from engine.models.architectures.parts import MIXTRAL
from engine.models.architectures.record import DecoderRecord, Family, GgufRecord, MlxRecord, MoeRecord, RouterRecord

FAMILIES = (
    Family(
        "mixtral",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        decoder=DecoderRecord(windows=one_window, rope_theta=1_000_000.0),
        moe=MoeRecord(MIXTRAL, RouterRecord(("block_sparse_moe.gate.weight", "mlp.gate.weight"), normalise=True)),
        gguf=GgufRecord(
            "llama",
            "MixtralForCausalLM",
            settings=lambda metadata: experts("num_local_experts")(metadata) | {"sliding_window": None},
            paired_rotary=True,
            changes=paired_changes,
        ),
        mlx=MlxRecord("mixtral", block="block_sparse_moe", route="softmax-of-best"),
        tokenizer_class="TokenizersBackend",
        keeps_llama_tokenizer=True,
    ),
)
