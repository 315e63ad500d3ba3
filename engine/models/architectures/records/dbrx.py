"""DBRX, whose settings lie in sections."""

from engine.models.architectures.parts import prepared
from engine.models.architectures.record import Config, DecoderRecord, ExpertTensor, Family, MlxRecord, MoeRecord

_EXPERTS = "transformer.blocks.{layer}.ffn.experts.mlp."
_LAYOUT = (
    ExpertTensor(f"{_EXPERTS}w1", ("gate",), "rows"),
    ExpertTensor(f"{_EXPERTS}v1", ("up",), "rows"),
    ExpertTensor(f"{_EXPERTS}w2", ("down",), "rows", transposed=True),
)


def _unusual_feed_forward(config: Config) -> str | None:
    feed_forward = config.get("ffn_config") or {}
    activation = (feed_forward.get("ffn_act_fn") or {"name": "silu"}).get("name")
    if activation != "silu":
        return f"ffn_act_fn {activation!r}"
    norm = feed_forward.get("moe_normalize_expert_weights", 1.0)
    return None if norm == 1 else f"moe_normalize_expert_weights {norm!r}"


def _translate(config: Config) -> Config:
    attention = dict(config["attn_config"])
    rope = config.get("rope_parameters") or {}
    # The original checkpoints have it here, where mlx-lm looks and transformers 5.23 does not.
    attention.setdefault("rope_theta", rope.get("rope_theta", config.get("rope_theta")))
    # mlx-lm always clips; transformers does not when the bound is None.
    attention["clip_qkv"] = float("inf") if attention.get("clip_qkv") is None else attention["clip_qkv"]
    return {"attn_config": attention}


FAMILIES = (
    Family(
        "dbrx",
        layers_prefix="transformer.blocks.",
        decoder=DecoderRecord(rope_theta_key="attn_config.rope_theta"),
        moe=MoeRecord(
            (_LAYOUT, prepared(_EXPERTS)),
            count_key="ffn_config.moe_num_experts",
            per_token_key="ffn_config.moe_top_k",
            ffn_key="ffn_config.ffn_hidden_size",
        ),
        native=False,
        mlx=MlxRecord(
            "dbrx",
            backbone="transformer",
            block="ffn",
            experts="experts",
            route="best-of-softmax-by-length",
            honours={"tie_word_embeddings": (False,)},
            checks=(_unusual_feed_forward,),
            translate=_translate,
            read_elsewhere=False,
        ),
        tokenizer_class="GPT2Tokenizer",
    ),
)
