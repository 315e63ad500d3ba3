"""The tower of a GGUF model, which is published in a file of its own beside the model's (``mmproj-F16.gguf``).

The names of its tensors and settings are those of llama.cpp's converter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError, shown
from engine.models.architectures.families import FAMILIES
from engine.models.architectures.gguf_architectures import tensor_of
from engine.models.architectures.gguf_metadata import Metadata
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.safetensors_files import TensorEntry

_PLACEHOLDER = "<|image_pad|>"
"""Qwen's token that stands for a picture in a prompt."""
_HALVES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The tensor of a convolution over two pictures of a film, one after the other."""
_NAMES = (
    (r"v\.patch_embd\.bias", "patch_embed.proj.bias"),
    (r"v\.position_embd\.(\w+)", r"pos_embed.\1"),
    (r"v\.blk\.(\d+)\.ln([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
    (r"v\.blk\.(\d+)\.attn_qkv\.(\w+)", r"blocks.\1.attn.qkv.\2"),
    (r"v\.blk\.(\d+)\.attn_out\.(\w+)", r"blocks.\1.attn.proj.\2"),
    (r"v\.blk\.(\d+)\.ffn_up\.(\w+)", r"blocks.\1.mlp.linear_fc1.\2"),
    (r"v\.blk\.(\d+)\.ffn_down\.(\w+)", r"blocks.\1.mlp.linear_fc2.\2"),
    (r"v\.post_ln\.(\w+)", r"merger.norm.\1"),
    (r"mm\.0\.(\w+)", r"merger.linear_fc1.\1"),
    (r"mm\.2\.(\w+)", r"merger.linear_fc2.\1"),
)
"""Names of tensors, and what they are called in transformers' module."""


@dataclass(frozen=True)
class TowerSettings:
    """What a folder of safetensors would say of the tower."""

    config: dict[str, Any]
    """``config.json`` of the whole model."""
    processor: dict[str, Any]
    """``preprocessor_config.json``."""


def may_see(config: Mapping[str, Any]) -> bool:
    """Whether a language model of this configuration can have a tower in a GGUF file."""
    family = FAMILIES.get(config["model_type"])
    return family is not None and family.whole.startswith("qwen3_5")


def settings_of(tower: GgufFile, config: Mapping[str, Any], tokens: list[str]) -> TowerSettings | None:
    """The settings of the file ``tower`` beside a model of the configuration ``config`` and the vocabulary ``tokens``.

    None if it is a tower of another model, or of a kind that is not known. Raises ModelError if the file is damaged.
    """
    metadata = Metadata(tower)
    if tower.metadata.get("general.architecture") != "clip" or not may_see(config):
        return None
    if (metadata.get("vision.projector_type") or metadata.get("projector_type")) != "qwen3vl_merger":
        return None
    if metadata.number("vision.projection_dim") != config["hidden_size"] or _PLACEHOLDER not in tokens:
        return None
    if any(metadata.get("vision.is_deepstack_layers") or ()):
        return None
    vision = {
        "depth": metadata.number("vision.block_count"),
        "hidden_size": metadata.number("vision.embedding_length"),
        "intermediate_size": metadata.number("vision.feed_forward_length"),
        "num_heads": metadata.number("vision.attention.head_count"),
        "patch_size": metadata.number("vision.patch_size"),
        "spatial_merge_size": metadata.number("vision.spatial_merge_size", 2),
        "temporal_patch_size": len(_HALVES),
        "out_hidden_size": config["hidden_size"],
        "num_position_embeddings": tensor_of(tower, "v.position_embd.weight").rows,
    }
    processor: dict[str, Any] = {
        key: _three(tower, metadata.get(f"vision.{key}"))
        for key in ("image_mean", "image_std")
        if metadata.has(f"vision.{key}")
    }
    for key in ("min_pixels", "max_pixels"):
        if metadata.has(f"vision.image_{key}"):
            processor[key] = metadata.number(f"vision.image_{key}")
    whole = {
        "model_type": FAMILIES[config["model_type"]].whole,
        "image_token_id": tokens.index(_PLACEHOLDER),
        "vision_config": vision,
        "text_config": config,
    }
    return TowerSettings(whole, processor)


def _three(tower: GgufFile, values: Any) -> list[float]:
    """Raises ModelError if ``values`` are not three numbers."""
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(each, float) for each in values):
        raise ModelError(
            f"{tower.path} is damaged: its colours are {shown(values)}, not three numbers; download it again."
        )
    return [round(each, 6) if math.isfinite(each) else each for each in values]


def tower_entries(tower: GgufFile) -> dict[str, tuple[TensorEntry, ...]]:
    """The places of the tensors of the file, by their names in transformers' module."""
    entries = {"patch_embed.proj.weight": tuple(_entry(tower, name) for name in _HALVES)}
    for name in tower.tensors:
        for pattern, instead in _NAMES:
            match = re.fullmatch(pattern, name)
            if match is not None:
                entries[match.expand(instead)] = (_entry(tower, name),)
    return entries


def _entry(tower: GgufFile, name: str) -> TensorEntry:
    """Raises ModelError if there is no such tensor."""
    tensor = tensor_of(tower, name)
    return TensorEntry(tensor.format, tensor.shape, tensor.offset, tensor.offset + tensor.nbytes)
