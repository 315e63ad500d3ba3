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
from engine.models.architectures.gguf_metadata import Metadata, tensor_of
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.safetensors_files import TensorEntry

_QWEN, _GEMMA_3, _GEMMA, _UNIFIED, _MISTRAL = "qwen3vl_merger", "gemma3", "gemma4v", "gemma4uv", "pixtral"
"""llama.cpp's names of the towers that are known."""
_KINDS = {
    "gemma3": (_GEMMA_3,),
    "gemma4": (_GEMMA, _UNIFIED),
    "mistral3": (_MISTRAL,),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), (_QWEN,)),
}
"""The towers of whole models, by their ``model_type``."""
_DEEP = ("qwen3_vl", "qwen3_vl_moe")
"""Models that also read features of single layers of their tower (deepstack)."""
_GEMMA_TOKENS = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
_TOKENS = {
    _QWEN: {"image_token_id": "<|image_pad|>"},
    _GEMMA_3: {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
    _GEMMA: _GEMMA_TOKENS,
    _UNIFIED: _GEMMA_TOKENS,
    _MISTRAL: {
        "image_token_index": "[IMG]",
        "image_break_token_id": "[IMG_BREAK]",
        "image_end_token_id": "[IMG_END]",
    },
}
"""The token that stands for a picture in a prompt, and those before and after it, by the settings that have their ids.
A model without the first sees nothing."""
_HALVES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The tensor of a convolution over two pictures of a film, one after the other."""
_QWEN_NAMES = (
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
    (r"v\.deepstack\.(\d+)\.norm\.(\w+)", r"deepstack_merger_list.\1.norm.\2"),
    (r"v\.deepstack\.(\d+)\.fc([12])\.(\w+)", r"deepstack_merger_list.\1.linear_fc\2.\3"),
)
"""Names of tensors, and what they are called in transformers' module."""
_LAYER = r"vision_tower.encoder.layers.\1."
_GEMMA_NAMES = (
    (r"v\.patch_embd\.weight", "vision_tower.patch_embedder.input_proj.weight"),
    (r"v\.position_embd\.weight", "vision_tower.patch_embedder.position_embedding_table"),
    (r"v\.std_(bias|scale)", r"vision_tower.std_\1"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.weight", _LAYER + r"self_attn.\2_proj.linear.weight"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.((?:in|out)put_m\w+)", _LAYER + r"self_attn.\2_proj.\3"),
    (r"v\.blk\.(\d+)\.attn_out\.weight", _LAYER + "self_attn.o_proj.linear.weight"),
    (r"v\.blk\.(\d+)\.attn_out\.((?:in|out)put_m\w+)", _LAYER + r"self_attn.o_proj.\2"),
    (r"v\.blk\.(\d+)\.attn_([qk])_norm\.weight", _LAYER + r"self_attn.\2_norm.weight"),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.weight", _LAYER + r"mlp.\2_proj.linear.weight"),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.((?:in|out)put_m\w+)", _LAYER + r"mlp.\2_proj.\3"),
    (r"v\.blk\.(\d+)\.ln1\.weight", _LAYER + "input_layernorm.weight"),
    (r"v\.blk\.(\d+)\.attn_post_norm\.weight", _LAYER + "post_attention_layernorm.weight"),
    (r"v\.blk\.(\d+)\.ln2\.weight", _LAYER + "pre_feedforward_layernorm.weight"),
    (r"v\.blk\.(\d+)\.ffn_post_norm\.weight", _LAYER + "post_feedforward_layernorm.weight"),
    (r"mm\.input_projection\.weight", "embed_vision.embedding_projection.weight"),
)
_UNIFIED_NAMES = (
    (r"v\.patch_embd\.(\w+)", r"patch_dense.\1"),
    (r"v\.patch_norm\.([12])\.(\w+)", r"patch_ln\1.\2"),
    (r"v\.patch_norm\.3\.(\w+)", r"pos_norm.\1"),
    (r"v\.position_embd\.weight", "pos_embedding"),
    (r"mm\.input_projection\.weight", "multimodal_embedder.embedding_projection.weight"),
)
_GEMMA_3_NAMES = (
    (r"v\.(patch|position)_embd\.(\w+)", r"vision_tower.embeddings.\1_embedding.\2"),
    (r"v\.blk\.(\d+)\.ln([12])\.(\w+)", _LAYER + r"layer_norm\2.\3"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.(\w+)", _LAYER + r"self_attn.\2_proj.\3"),
    (r"v\.blk\.(\d+)\.attn_out\.(\w+)", _LAYER + r"self_attn.out_proj.\2"),
    (r"v\.blk\.(\d+)\.ffn_up\.(\w+)", _LAYER + r"mlp.fc1.\2"),
    (r"v\.blk\.(\d+)\.ffn_down\.(\w+)", _LAYER + r"mlp.fc2.\2"),
    (r"v\.post_ln\.(\w+)", r"vision_tower.post_layernorm.\1"),
    (r"mm\.input_projection\.weight", "multi_modal_projector.mm_input_projection_weight"),
    (r"mm\.soft_emb_norm\.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
)
_MISTRAL_LAYER = r"vision_tower.transformer.layers.\1."
_MISTRAL_NAMES = (
    (r"v\.patch_embd\.weight", "vision_tower.patch_conv.weight"),
    (r"v\.pre_ln\.weight", "vision_tower.ln_pre.weight"),
    (r"v\.blk\.(\d+)\.ln1\.weight", _MISTRAL_LAYER + "attention_norm.weight"),
    (r"v\.blk\.(\d+)\.ln2\.weight", _MISTRAL_LAYER + "ffn_norm.weight"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.weight", _MISTRAL_LAYER + r"attention.\2_proj.weight"),
    (r"v\.blk\.(\d+)\.attn_out\.weight", _MISTRAL_LAYER + "attention.o_proj.weight"),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.weight", _MISTRAL_LAYER + r"feed_forward.\2_proj.weight"),
    (r"mm\.input_norm\.weight", "multi_modal_projector.norm.weight"),
    (r"mm\.patch_merger\.weight", "multi_modal_projector.patch_merger.merging_layer.weight"),
    (r"mm\.([12])\.(\w+)", r"multi_modal_projector.linear_\1.\2"),
)
_NAMES = {
    _QWEN: _QWEN_NAMES,
    _GEMMA_3: _GEMMA_3_NAMES,
    _GEMMA: _GEMMA_NAMES,
    _UNIFIED: _UNIFIED_NAMES,
    _MISTRAL: _MISTRAL_NAMES,
}
_OF_PATCHES = ("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias")
"""Tensors with a number for each colour of each pixel of a patch."""


@dataclass(frozen=True)
class TowerSettings:
    """What a folder of safetensors would say of the tower."""

    config: dict[str, Any]
    """``config.json`` of the whole model."""
    processor: dict[str, Any]
    """``preprocessor_config.json``."""


def may_see(config: Mapping[str, Any]) -> bool:
    """Whether a language model of this configuration can have a tower in a GGUF file."""
    heads = config["num_attention_heads"] * (config.get("head_dim") or 0)
    # Of what calls itself llama only Mistral Small has a tower that is known, and heads narrower than what they read.
    return _whole(config) in _KINDS and (config["model_type"] != "llama" or 0 < heads < config["hidden_size"])


def _whole(config: Mapping[str, Any]) -> str:
    """The ``model_type`` of the whole model whose language model this is; empty if it is part of none."""
    family = FAMILIES.get(config["model_type"])
    # Files of Mistral Small call themselves llama.
    return "mistral3" if config["model_type"] == "llama" else "" if family is None else family.whole


def settings_of(tower: GgufFile, config: Mapping[str, Any], tokens: list[str]) -> TowerSettings | None:
    """The settings of the file ``tower`` beside a model of the configuration ``config`` and the vocabulary ``tokens``.

    None if it is a tower of another model, or of a kind that is not known. Raises ModelError if the file is damaged.
    """
    metadata = Metadata(tower)
    kind = _kind_of(tower)
    whole_type = _whole(config)
    if not kind or kind not in _KINDS.get(whole_type, ()):
        return None
    ids = {key: tokens.index(token) for key, token in _TOKENS[kind].items() if token in tokens}
    if metadata.number("vision.projection_dim") != config["hidden_size"] or next(iter(_TOKENS[kind])) not in ids:
        return None
    deep = _deep_layers(metadata)
    if bool(deep) != (whole_type in _DEEP):
        return None
    whole: dict[str, Any] = {"model_type": whole_type, **ids}
    if kind == _GEMMA_3:
        side, vision = _gemma_3(metadata)
        whole |= {"mm_tokens_per_image": side**2, "vision_config": vision, "text_config": dict(config)}
        return TowerSettings(whole, _colours(tower, metadata))
    if kind == _MISTRAL:
        if len(ids) < len(_TOKENS[kind]) or "mm.patch_merger.weight" not in tower.tensors:
            return None
        whole |= _mistral(tower, metadata) | {"text_config": dict(config)}
        return TowerSettings(whole, _colours(tower, metadata))
    if kind != _QWEN:
        text = dict(config)
        if not config.get("hidden_size_per_layer_input"):
            # Files do not say it. Those with embeddings of their own for each layer are published without.
            text["use_bidirectional_attention"] = "vision"
        if kind == _UNIFIED:
            whole["model_type"] = "gemma4_unified"
            return TowerSettings(whole | {"vision_config": _unified(tower, metadata), "text_config": text}, {})
        return TowerSettings(whole | {"vision_config": _gemma(tower, metadata), "text_config": text}, {})
    vision = _qwen(tower, metadata, config["hidden_size"])
    if deep:
        vision["deepstack_visual_indexes"] = deep
    processor = _colours(tower, metadata)
    for key in ("min_pixels", "max_pixels"):
        if metadata.has(f"vision.image_{key}"):
            processor[key] = metadata.number(f"vision.image_{key}")
    return TowerSettings(whole | {"vision_config": vision, "text_config": dict(config)}, processor)


def _colours(tower: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """What the file says of how colours are scaled. Raises ModelError if that is damaged."""
    return {
        key: _three(tower, metadata.get(f"vision.{key}"))
        for key in ("image_mean", "image_std")
        if metadata.has(f"vision.{key}")
    }


def _kind_of(tower: GgufFile) -> str:
    """What the file calls its tower; empty if it is of no known kind."""
    known = tower.metadata.get("general.architecture") == "clip"
    kind = tower.metadata.get("clip.vision.projector_type") or tower.metadata.get("clip.projector_type")
    return kind if known and isinstance(kind, str) and kind in _NAMES else ""


def _deep_layers(metadata: Metadata) -> list[int]:
    """The layers of the tower whose features the language model reads."""
    flags = metadata.get("vision.is_deepstack_layers")
    return [layer for layer, deep in enumerate(flags) if deep] if isinstance(flags, list) else []


def _qwen(tower: GgufFile, metadata: Metadata, hidden: int) -> dict[str, Any]:
    return {
        "depth": metadata.number("vision.block_count"),
        "hidden_size": metadata.number("vision.embedding_length"),
        "intermediate_size": metadata.number("vision.feed_forward_length"),
        "num_heads": metadata.number("vision.attention.head_count"),
        "patch_size": metadata.number("vision.patch_size"),
        "spatial_merge_size": metadata.number("vision.spatial_merge_size", 2),
        "temporal_patch_size": len(_HALVES),
        "out_hidden_size": hidden,
        "num_position_embeddings": tensor_of(tower, "v.position_embd.weight").rows,
    }


def _gemma_3(metadata: Metadata) -> tuple[int, dict[str, Any]]:
    """Tokens of a side of a picture, and the settings of the tower."""
    pixels, patch = metadata.number("vision.image_size"), metadata.number("vision.patch_size")
    vision = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": metadata.number("vision.block_count"),
        "hidden_size": metadata.number("vision.embedding_length"),
        "intermediate_size": metadata.number("vision.feed_forward_length"),
        "num_attention_heads": metadata.number("vision.attention.head_count"),
        "layer_norm_eps": metadata.short_real("vision.attention.layer_norm_epsilon", 1e-6),
        "image_size": pixels,
        "patch_size": patch,
    }
    return max(1, pixels // patch // metadata.number("vision.projector.scale_factor", 4)), vision


def _gemma(tower: GgufFile, metadata: Metadata) -> dict[str, Any]:
    heads, queries = metadata.number("vision.attention.head_count"), tensor_of(tower, "v.blk.0.attn_q.weight").rows
    width = max(1, queries // heads)
    return {
        "num_hidden_layers": metadata.number("vision.block_count"),
        "hidden_size": metadata.number("vision.embedding_length"),
        "intermediate_size": metadata.number("vision.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, tensor_of(tower, "v.blk.0.attn_k.weight").rows // width),
        "head_dim": width,
        "patch_size": metadata.number("vision.patch_size"),
        # One table for columns and one for rows.
        "position_embedding_size": max(1, tensor_of(tower, "v.position_embd.weight").rows // 2),
        "standardize": "v.std_bias" in tower.tensors,
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in tower.tensors,
    }


def _unified(tower: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """Raises ModelError if a patch is not square."""
    patch, dense = metadata.number("vision.patch_size"), tensor_of(tower, "v.patch_embd.weight")
    side = math.isqrt(dense.shape[-1] // 3)
    if 3 * side**2 != dense.shape[-1] or side % patch:
        raise ModelError(
            f"{tower.path} is damaged: its patches have {dense.shape[-1]} numbers, not three colours of a square of a "
            f"multiple of {patch} pixels; download it again."
        )
    return {
        "patch_size": patch,
        "pooling_kernel_size": side // patch,
        "mm_embed_dim": dense.rows,
        "mm_posemb_size": max(1, tensor_of(tower, "v.position_embd.weight").rows // 2),
        "output_proj_dims": dense.rows,
    }


def _mistral(tower: GgufFile, metadata: Metadata) -> dict[str, Any]:
    return {
        "spatial_merge_size": metadata.number("vision.spatial_merge_size", 2),
        "multimodal_projector_bias": "mm.1.bias" in tower.tensors,
        "vision_config": {
            "model_type": "pixtral",
            "num_hidden_layers": metadata.number("vision.block_count"),
            "hidden_size": metadata.number("vision.embedding_length"),
            "intermediate_size": metadata.number("vision.feed_forward_length"),
            "num_attention_heads": metadata.number("vision.attention.head_count"),
            "image_size": metadata.number("vision.image_size"),
            "patch_size": metadata.number("vision.patch_size"),
            "hidden_act": "silu" if metadata.get("use_silu") else "gelu",
        },
    }


def _three(tower: GgufFile, values: Any) -> list[float]:
    """Raises ModelError if ``values`` are not three numbers."""
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(each, float) for each in values):
        raise ModelError(
            f"{tower.path} is damaged: its colours are {shown(values)}, not three numbers; download it again."
        )
    return [round(each, 8) if math.isfinite(each) else each for each in values]


def tower_entries(tower: GgufFile) -> dict[str, tuple[TensorEntry, ...]]:
    """The places of the tensors of the file, by their names in transformers' module. Raises ModelError if it holds no
    known tower."""
    kind = _kind_of(tower)
    if not kind:
        raise ModelError(f"{tower.path} holds no tower of a known kind; fetch the model's own mmproj file.")
    entries: dict[str, tuple[TensorEntry, ...]] = {}
    deep: list[int] = []
    exchanged = kind == _GEMMA_3 and _exchanged(tower)
    if kind == _QWEN:
        entries["patch_embed.proj.weight"] = tuple(_entry(tower, name) for name in _HALVES)
        deep = _deep_layers(Metadata(tower))
    for name in tower.tensors:
        # Files number what reads single layers by the layer.
        numbered = re.sub(r"(?<=v\.deepstack\.)\d+", lambda layer: _place(deep, int(layer[0])), name)
        if exchanged:
            numbered = re.sub("(?<=ffn_)(up|down)", lambda end: {"up": "down", "down": "up"}[end[0]], name)
        for pattern, instead in _NAMES[kind]:
            match = re.fullmatch(pattern, numbered)
            if match is not None:
                entries[match.expand(instead)] = (_entry(tower, name),)
    return entries


def _exchanged(tower: GgufFile) -> bool:
    """Whether the file calls the first matrix of a network "down" and the second "up", as files of early 2025 do."""
    return tensor_of(tower, "v.blk.0.ffn_down.weight").shape[-1] == Metadata(tower).number("vision.embedding_length")


def heads_of(tower: GgufFile) -> int:
    """Heads of the attention of a tower; 1 without layers. Raises ModelError if the file is damaged."""
    return Metadata(tower).number("vision.attention.head_count", 0) or 1


def added_to(name: str) -> float:
    """What is added to the numbers of a file's tensor called ``name`` in transformers' module, to get the module's."""
    return -1.0 if name.endswith("mm_soft_emb_norm.weight") else 0.0


Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The shape in which axes of a tensor are moved, their new order, and the shape that the result has."""


def moved_axes(name: str, shape: tuple[int, ...], heads: int) -> Axes | None:
    """What brings the tensor called ``name`` in transformers' module from its ``shape`` in a file into the module's
    order; None: it is in it. Files have the colours of a patch before its rows and columns, tables apart, and, of
    Mistral, side by side the two rows of a query or key of which a rotation turns the numbers together. ``heads``: of
    the tower."""
    if re.search(r"\.attention\.[qk]_proj\.", name) and len(shape) == 2 and shape[0] % (2 * heads) == 0:
        return (heads, shape[0] // heads // 2, 2, shape[1]), (0, 2, 1, 3), shape
    if name == "vision_tower.patch_embedder.input_proj.weight" and len(shape) == 4:
        return shape, (0, 2, 3, 1), (shape[0], math.prod(shape[1:]))
    if name in _OF_PATCHES:
        side = math.isqrt(shape[-1] // 3)
        return (math.prod(shape[:-1]), 3, side, side), (0, 2, 3, 1), shape
    return (shape, (1, 0, 2), (shape[1], shape[0], shape[2])) if name == "pos_embedding" and len(shape) == 3 else None


def _place(deep: list[int], layer: int) -> str:
    """The place of ``layer`` among the ``deep`` ones; "none" if it is none of them."""
    return str(deep.index(layer)) if layer in deep else "none"


def _entry(tower: GgufFile, name: str) -> TensorEntry:
    """Raises ModelError if there is no such tensor."""
    tensor = tensor_of(tower, name)
    return TensorEntry(tensor.format, tensor.shape, tensor.offset, tensor.offset + tensor.nbytes)
