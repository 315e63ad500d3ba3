"""GLM-5.3-Flash without pictures (transformers' glm5_next): delta-nets whose keys decay each by itself, attention over
latents that sees the pools of tokens that an indexer chooses, and several residual streams, mixed without a norm of
their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from engine.errors import damaged, shown
from engine.models.architectures import gguf_kda, gguf_latent, gguf_parts
from engine.models.architectures.config_values import setting, whole_number
from engine.models.architectures.gguf_latent import FULL, SHARED
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.architectures.layer_rules import UNROTATED, check_kinds, sparse_layers
from engine.models.architectures.record import BlockChoice, Config, DecoderRecord, DeltaSizes, Family, GgufRecord
from engine.models.architectures.records.deepseek import MOE
from engine.models.formats.gguf_file import GgufFile

_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
"""Settings in the section ``linear_attn_config`` of files, and transformers' names of them."""


def _renamed(config: Config) -> dict[str, Any]:
    sizes = {now: setting(config, f"linear_attn_config.{name}") for name, now in _SIZES.items()}
    found: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        found["layer_types"] = ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]
    return found


def _delta(config: Config) -> DeltaSizes:
    heads, width = whole_number(config, "linear_num_heads"), whole_number(config, "linear_head_dim")
    least = config["linear_lower_bound"]
    if not isinstance(least, int | float) or not least < 0:
        raise damaged(f"config.json gives {shown(least)} for linear_lower_bound, which must be a number below 0")
    sizes = DeltaSizes(heads, heads, width, width, whole_number(config, "linear_conv_kernel_dim"), wide_decays=True)
    return replace(sizes, sigmoid_gates=True, rank=width, least_decay=float(least))


def _kind(config: Config, layer: int) -> str:
    return "linear_attention" if (layer + 1) % 4 else "full_attention"


def _attending(config: Config, layers: int) -> list[int]:
    kinds = config.get("layer_types") or [_kind(config, layer) for layer in range(layers)]
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


def _with_indexers(config: Config, layers: int) -> list[int]:
    """The layers that have an indexer of their own. Raises ModelError if another one follows none of them."""
    attending = _attending(config, layers)
    named = config.get("indexer_types")
    if named is None:
        return attending
    kinds = check_kinds(named, layers, (FULL, SHARED), "indexer_types")
    found = [layer for layer in attending if kinds[layer] == FULL]
    lost = next((layer for layer in attending if kinds[layer] == SHARED and layer - 1 not in found), None)
    if lost is not None:
        raise damaged(f"config.json lets layer {lost + 1} share the indexer of the one before it, which has none")
    return found


def _settings(metadata: Metadata) -> dict[str, Any]:
    """Raises ModelError for a number that is missing or impossible, and for several limits of networks."""
    settings = gguf_kda.settings(metadata) | gguf_latent.indexed_settings(metadata)
    layers, least = settings["num_hidden_layers"], metadata.get("kda.gate_lower_bound")
    dense = settings.pop("first_k_dense_replace")
    return settings | {
        "rope_parameters": {},
        "indexer_types": gguf_latent.indexer_types(metadata, layers) or [FULL] * layers,
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "num_local_experts": settings["n_routed_experts"],
        "linear_head_dim": metadata.number("kda.head_dim"),
        "linear_num_heads": metadata.number("attention.head_count"),
        "linear_lower_bound": least,
        "swiglu_limit": gguf_parts.one_limit(metadata, layers),
        "index_kpool": metadata.number("attention.indexer.kpool"),
        "index_kpool_always_select_tail": bool(metadata.get("attention.indexer.kpool_select_tail", False)),
        **gguf_parts.stream_settings(metadata),
    }


def _mixer(gguf: GgufFile, config: Config, here: str, target: str) -> Iterator[NamedTensor]:
    """The tensors of a layer's delta-net, or of its attention and its indexer."""
    layer = int(here.split(".")[1])
    if config["layer_types"][layer] == "linear_attention":
        yield from gguf_kda.tensors(_delta)(gguf, config, here, target)
        return
    yield from gguf_latent.indexed_shapes(_with_indexers)(gguf, config, here, target)
    if layer in _with_indexers(config, config["num_hidden_layers"]):
        width, prefix = config["index_head_dim"], target + "self_attn.indexer.index_kpool_compress_"
        for short, rows in (("ape", (config["index_kpool"], width)), ("gate", (width, config["hidden_size"]))):
            yield NamedTensor.whole(f"{here}indexer_compressor_{short}.weight", prefix + short, rows)


def _blocks(config: Config) -> BlockChoice:
    size, budget = whole_number(config, "index_kpool"), whole_number(config, "index_topk")
    if budget % size:
        raise damaged(f"config.json gives {budget} for index_topk, which must be a multiple of {size}")
    return BlockChoice(
        whole_number(config, "index_n_heads"), whole_number(config, "index_head_dim"), size, budget, gated=True
    )


FAMILIES = (
    Family(
        "glm5_next_text",
        whole="glm5_next",
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 256,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "linear_head_dim": 128,
            "linear_num_heads": 64,
            "linear_conv_kernel_dim": 4,
            "linear_lower_bound": -5.0,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "swiglu_limit": 10.0,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_kpool": 16,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
        },
        renamed=_renamed,
        decoder=DecoderRecord(
            mixer="delta-net",
            delta=_delta,
            layer_kind=_kind,
            latents=True,
            head_kinds=lambda config, layers: [UNROTATED] * layers,
            unrotated=UNROTATED,
            index_width="index_head_dim",
            index_vectors=2,
            index_layers=_with_indexers,
            blocks=_blocks,
        ),
        moe=replace(MOE, layers=sparse_layers(lambda config: 3)),
        extra_layers=True,
        native=False,
        gguf=GgufRecord(
            "glm5-next",
            "Glm5NextForConditionalGeneration",
            settings=_settings,
            own_heads=True,
            mixer=_mixer,
            further=lambda gguf, config: gguf_parts.stream_tensors(config, "hc_{}_{}"),
            changes=gguf_kda.changes,
        ),
    ),
)
