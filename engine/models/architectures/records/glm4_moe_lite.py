"""GLM-4.7-Flash, whose attention is over latents. Its GGUF files call themselves deepseek2."""

from dataclasses import replace

from engine.models.architectures import gguf_latent
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.parts import LATENTS
from engine.models.architectures.record import (
    SCALED_ROPE,
    Config,
    DecoderRecord,
    Family,
    GgufRecord,
    MlxRecord,
)
from engine.models.architectures.records.deepseek import MOE


def _sparse_layers(config: Config, layers: int) -> list[int]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return list(range(1, layers))
    return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]


def _settings(metadata: Metadata) -> dict[str, object]:
    """The configuration names the kind of every layer."""
    found = gguf_latent.settings(metadata)
    dense, layers = found.pop("first_k_dense_replace"), found["num_hidden_layers"]
    return found | {"mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)]}


def _dense_layers_first(config: Config) -> str | None:
    kinds = config.get("mlp_layer_types")
    regular = kinds is None or sorted(kinds) == list(kinds)  # "dense" comes before "sparse"
    return None if regular else f"mlp_layer_types {kinds!r}"


def _translate(config: Config) -> Config:
    kinds = config.get("mlp_layer_types")
    return {"first_k_dense_replace": list(kinds).count("dense")} if kinds else {}


FAMILIES = (
    Family(
        "glm4_moe_lite",
        defaults={
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rope_interleave": True,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
        },
        decoder=DecoderRecord(latents=True, interleaving_setting="rope_interleave"),
        moe=replace(MOE, layers=_sparse_layers),
        extra_layers=True,
        gguf=GgufRecord(
            "deepseek2",
            "Glm4MoeLiteForCausalLM",
            when=lambda metadata: gguf_latent.scores_by_sigmoid(metadata) and gguf_latent.splits_as_glm(metadata),
            settings=_settings,
            own_heads=True,
            yarn=gguf_latent.yarn,
        ),
        mlx=MlxRecord(
            "glm4_moe_lite",
            route="own-gate",
            rope_types=SCALED_ROPE,
            honours={
                "hidden_act": ("silu",),
                "n_group": (1,),
                "rope_interleave": (True,),
                "tie_word_embeddings": (False,),
                "topk_method": ("noaux_tc",),
            },
            checks=(_dense_layers_first,),
            translate=_translate,
            stored_names=LATENTS,
        ),
        tokenizer_class="TokenizersBackend",
    ),
)
