"""DeepSeek V2, V3 and V3.2."""

from dataclasses import replace

from engine.errors import ModelError
from engine.models.architectures import gguf_latent
from engine.models.architectures.config_values import number_of, whole_number
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.layer_rules import after_dense, sparse_layers
from engine.models.architectures.parts import GROUPED, LATENTS, QWEN
from engine.models.architectures.record import (
    SCALED_ROPE,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
    MoeRecord,
    RouterRecord,
    own_keys,
)

_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_CHOICE = {
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
MOE = MoeRecord(
    QWEN,
    GROUPED,
    shared="plain",
    layers=after_dense("first_k_dense_replace"),
    count_key="n_routed_experts",
    ffn_key="moe_intermediate_size",
)
"""The experts of V3 and of families that follow it."""
SPARSE_MOE = replace(MOE, layers=sparse_layers(lambda config: whole_number(config, "first_k_dense_replace", minimum=0)))
"""The same where dense layers are named, too."""


def _softmax_settings(metadata: Metadata) -> dict[str, object]:
    """Raises ModelError if the weights of experts would have to be normalised, which transformers does not do in this
    family."""
    settings = gguf_latent.settings(metadata)
    if settings["norm_topk_prob"]:
        raise ModelError(
            "The GGUF normalises the weights of experts that a softmax gave, which no model of deepseek_v2 does; use "
            "another file of this model."
        )
    return settings | {"topk_method": "group_limited_greedy" if settings["n_group"] > 1 else "greedy"}


V2 = Family(
    "deepseek_v2",
    defaults=_LATENTS
    | {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy"},
    decoder=DecoderRecord(latents=True),
    moe=replace(MOE, router=RouterRecord(("mlp.gate.weight",), groups=1, scale=number_of("routed_scaling_factor"))),
    gguf=GgufRecord(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        when=lambda metadata: not gguf_latent.scores_by_sigmoid(metadata),
        settings=_softmax_settings,
        own_heads=True,
        yarn=gguf_latent.yarn,
    ),
)
V3 = Family(
    "deepseek_v3",
    defaults=_LATENTS | _CHOICE | {"rope_interleave": True},
    decoder=DecoderRecord(latents=True, interleaving_setting="rope_interleave"),
    moe=MOE,
    extra_layers=True,
    gguf=GgufRecord(
        "deepseek2",
        "DeepseekV3ForCausalLM",
        when=lambda metadata: gguf_latent.scores_by_sigmoid(metadata) and not gguf_latent.splits_as_glm(metadata),
        settings=gguf_latent.settings,
        own_heads=True,
        yarn=gguf_latent.yarn,
    ),
    mlx=MlxRecord(
        "deepseek_v3",
        route="own-gate",
        rope_types=SCALED_ROPE,
        honours={
            "hidden_act": ("silu",),
            "rope_interleave": (True,),
            "tie_word_embeddings": (False,),
            "topk_method": ("noaux_tc",),
            "scoring_func": ("sigmoid",),
            "moe_layer_freq": (1,),
        },
        stored_names=LATENTS,
    ),
)
V32 = Family(
    "deepseek_v32",
    defaults=_LATENTS
    | _CHOICE
    | {
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    decoder=DecoderRecord(latents=True, index_width="index_head_dim"),
    moe=SPARSE_MOE,
    extra_layers=True,
    gguf=GgufRecord(
        "deepseek32",
        "DeepseekV32ForCausalLM",
        settings=gguf_latent.indexed_settings,
        own_heads=True,
        yarn=gguf_latent.yarn,
        mixer=gguf_latent.indexed_shapes(own_keys),
    ),
)
FAMILIES = (V2, V3, V32)
