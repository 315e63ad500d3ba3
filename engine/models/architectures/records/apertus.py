"""Apertus: networks have no gate, and xIELU as activation, whose numbers each layer learned."""

from __future__ import annotations

from engine.models.architectures.record import SCALED_ROPE, Config, DecoderRecord, Family, GgufRecord, MlxRecord

_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _other_width(config: Config) -> str | None:
    """mlx-lm divides the hidden state among the heads."""
    heads, width = config.get("num_attention_heads"), config.get("head_dim")
    return f"head_dim {width!r}" if width and heads and width * heads != config.get("hidden_size") else None


FAMILIES = (
    Family(
        "apertus",
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "xielu"},
        decoder=DecoderRecord(
            ungated=True,
            head_norm="per-head",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            rope_theta=12_000_000.0,
            rope=_ROPE,
            names={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
        ),
        gguf=GgufRecord(
            "apertus",
            "ApertusForCausalLM",
            settings=lambda metadata: {"hidden_act": "xielu"},
            listed={
                "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
                "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
                "xielu.beta": ("mlp.act_fn.beta", ()),
                "xielu.eps": ("mlp.act_fn.eps", ()),
            },
        ),
        mlx=MlxRecord(
            "apertus",
            rope_types=SCALED_ROPE,
            honours={"hidden_act": ("xielu",), "attention_bias": (False,)},
            checks=(_other_width,),
            translate=lambda config: {"mlp_bias": False, "post_norm": False, "qk_norm": True},
        ),
    ),
)
