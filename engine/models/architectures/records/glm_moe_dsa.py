"""GLM-5 to 5.3, whose queries see the positions that an indexer chooses, which several layers may share."""

from typing import Any

from engine.errors import damaged, shown
from engine.models.architectures import gguf_latent
from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_latent import FULL, SHARED
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.architectures.layer_rules import check_kinds
from engine.models.architectures.record import Config, DecoderRecord, Family, GgufRecord
from engine.models.architectures.records.deepseek import SPARSE_MOE

_LETTERS = {"F": FULL, "S": SHARED}
_LONG_CONTEXT = 1_048_576
"""Context from which on files that name no indexers share them, as GLM-5.2 does."""


def _with_indexers(config: Config, layers: int) -> list[int]:
    """The layers that have an indexer of their own. Raises ModelError if the first layer has none."""
    named = config.get("indexer_types")
    pattern = config.get("index_topk_pattern")
    if named is None and isinstance(pattern, str):
        named = [_LETTERS.get(letter, letter) for letter in pattern]
    if named is None:
        named = pattern
    if named is None:
        every, first = (
            whole_number(config, key, default=default, minimum=0)
            for key, default in (("index_topk_freq", 1), ("index_skip_topk_offset", 2))
        )
        return [layer for layer in range(layers) if max(layer - first + 1, 0) % max(every, 1) == 0]
    found = [i for i, kind in enumerate(check_kinds(named, layers, (FULL, SHARED), "indexer_types")) if kind == FULL]
    if 0 not in found:
        raise damaged(f"config.json gives {shown(named)} for indexer_types, of which the first must be {FULL!r}")
    return found


def _settings(metadata: Metadata) -> dict[str, Any]:
    settings = gguf_latent.indexed_settings(metadata)
    kinds = gguf_latent.indexer_types(metadata, settings["num_hidden_layers"])
    if kinds is not None:
        return settings | {"indexer_types": kinds}
    if metadata.number("context_length") >= _LONG_CONTEXT:
        return settings | {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    return settings


FAMILIES = (
    Family(
        "glm_moe_dsa",
        defaults={
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "q_lora_rank": 2048,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
        },
        decoder=DecoderRecord(
            latents=True, index_width="index_head_dim", index_layers=_with_indexers, index_interleaved=True
        ),
        moe=SPARSE_MOE,
        extra_layers=True,
        gguf=GgufRecord(
            "glm-dsa",
            "GlmMoeDsaForCausalLM",
            settings=_settings,
            own_heads=True,
            yarn=gguf_latent.yarn,
            mixer=gguf_latent.indexed_shapes(_with_indexers),
        ),
    ),
)
