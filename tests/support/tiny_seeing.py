"""Tiny random models that see pictures, written whole by transformers' own ``save_pretrained``."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine.pictures.picture import Picture
from tests.support.speaking_model import write_tokenizer
from tests.support.tiny_families import tiny_config
from tests.support.tiny_gguf_metadata import PLACEHOLDER

_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
}
_DEEP_VISION = _QWEN_VISION | {"depth": 4, "deepstack_visual_indexes": [0, 2]}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 240,
    "patch_size": 4,
    "hidden_act": "silu",
}
_GEMMA_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 256,
    "standardize": True,
}
_UNIFIED_VISION: dict[str, Any] = {
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 40,
    "mm_posemb_size": 80,
    "output_proj_dims": 40,
}
_BOTH_WAYS = {"use_bidirectional_attention": "vision"}
_KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", "qwen3_5_text", _QWEN_VISION, {}),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text", _QWEN_VISION, {}),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_text", _DEEP_VISION, {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_vl_moe_text", _DEEP_VISION, {"mlp_only_layers": []}),
    "gemma3": ("gemma3", "gemma3_text", _SIGLIP, {"sliding_window": 12}),
    "ministral3": ("mistral3", "ministral3", _PIXTRAL, {}),
    "mistral": ("mistral3", "mistral", _PIXTRAL, {"sliding_window": None}),
    "mistral4": ("mistral3", "mistral4", _PIXTRAL, {}),
    "gemma4": ("gemma4", "gemma4_text", _GEMMA_VISION, _BOTH_WAYS),
    "gemma4_dense": ("gemma4", "gemma4_dense", _GEMMA_VISION, _BOTH_WAYS),
    "gemma4_unified": ("gemma4_unified", "gemma4_unified_text", _UNIFIED_VISION, _BOTH_WAYS),
    "gemma4_e2b": ("gemma4", "gemma4_e2b", _GEMMA_VISION | {"use_clipped_linears": True}, {}),
}
_WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 16},
    **{kind: {"audio_config": None} for kind in ("gemma4", "gemma4_unified")},
}
"""Further settings of whole models."""
TINY_SEEING = tuple(_KINDS)
"""The tiny models: Qwen 3.5 and Qwen3-VL, dense and with experts; Gemma 3; Mistral 3, of which there are three
generations of language models; Gemma 4 with experts, dense and 12B, whose pictures' tokens see each other, and E2B,
whose do not."""


def write_tiny_seeing(
    folder: Path,
    kind: str,
    dtype: str = "float32",
    marks: tuple[int, int, int] = (PLACEHOLDER, 151, 152),
    **overrides: Any,
) -> Path:
    """Write the tiny model ``kind``, one of :data:`TINY_SEEING`, into ``folder``. ``overrides``: settings of its
    language model. ``dtype``: torch's name of the stored type. ``marks``: ids of the tokens for a picture, and, of
    Gemma 4, before and after it, of Gemma 3, after it and for its tokens, and of Mistral, after a row and after it. The
    same arguments give the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from tests.support.tiny_models import fill_randomly

    whole, text, vision, settings = _KINDS[kind]
    inner = tiny_config(text, **settings, **overrides).to_dict()
    if "depth" in vision:
        vision = {**vision, "out_hidden_size": inner["hidden_size"]}
    names = ("image_token_id", "boi_token_id", "eoi_token_id")
    if whole == "gemma3":
        names = ("boi_token_index", "eoi_token_index", "image_token_index")
    if whole == "mistral3":
        names = ("image_token_index", "image_break_token_id", "image_end_token_id")
    tied = inner.get("tie_word_embeddings", False)
    config = AutoConfig.for_model(
        whole, text_config=inner, vision_config=vision, tie_word_embeddings=tied, **_WHOLE.get(whole, {}),
        **dict(zip(names, marks, strict=True)),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    fill_randomly(model, text)
    model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        _transpose_experts(folder / "model.safetensors")
    processor: dict[str, Any] = {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    if whole == "gemma3":
        processor = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if whole == "mistral3":
        processor = {"size": {"longest_edge": 240}}
    if whole.startswith("gemma4"):
        processor = {"max_soft_tokens": 70}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _transpose_experts(path: Path) -> None:
    """As they are published."""
    from safetensors.torch import load_file, save_file

    tensors = {name: each.mT.contiguous() if ".experts." in name else each for name, each in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


TEMPLATE = (
    r"{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    r"{% for p in m.content %}{% if p.type == 'image' %}{{ '[<|image|>]' }}{% else %}{{ p.text }}{% endif %}"
    r"{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
"""A chat template that has places for pictures, in brackets."""


def write_speaking_seeing(folder: Path, kind: str, template: str = TEMPLATE) -> Path:
    """The same with a tokenizer of bytes, and with ``template``. The marks of pictures are tokens 2, 3 and 4."""
    wide = {"vocab_size_per_layer_input": 300} if kind == "gemma4_e2b" else {}
    write_tiny_seeing(folder, kind, marks=(2, 3, 4), vocab_size=300, **wide)
    return write_tokenizer(folder, template, ("<|image|>", "<|before|>", "<|after|>"))


def png(picture: Picture) -> bytes:
    """``picture`` as the bytes of a file."""
    file = io.BytesIO()
    Image.frombytes("RGB", (picture.width, picture.height), picture.rgb).save(file, "PNG")
    return file.getvalue()


@cache
def random_picture(height: int, width: int, seed: int = 0) -> Picture:
    """A picture of large coloured areas, so that each of its tokens differs."""
    random = np.random.default_rng(seed)
    areas = random.integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    pixels = areas.repeat(5, axis=0).repeat(5, axis=1)[:height, :width]
    return Picture(height, width, pixels.tobytes())
