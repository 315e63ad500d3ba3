"""Writes the vision tower of a tiny model as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, MODEL_TENSOR, TENSOR_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import VisionProjectorType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

Floats = NDArray[np.float32]


def write_tiny_tower(
    path: Path, seeing: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, *, width: int | None = None
) -> Path:
    """The tower of the model in the folder ``seeing`` as ``path``, its matrices in ``kind``. ``width``: what it says of
    the language model's width, if that is another."""
    config = json.loads((seeing / "config.json").read_text())
    vision, gemma = config["vision_config"], config["model_type"].startswith("gemma4")
    siglip, mistral = config["model_type"] == "gemma3", config["model_type"] == "mistral3"
    unified = config["model_type"] == "gemma4_unified"
    if unified:  # it has no layers
        vision |= {"num_hidden_layers": 0, "hidden_size": vision["mm_embed_dim"], "intermediate_size": 0}
        vision["num_attention_heads"] = 0
    depth = vision["depth" if "depth" in vision else "num_hidden_layers"]
    writer = GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(width or config["text_config"]["hidden_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(depth)
    writer.add_vision_head_count(vision["num_heads" if "num_heads" in vision else "num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    if gemma:
        writer.add_clip_vision_projector_type("gemma4uv" if unified else VisionProjectorType.GEMMA4V)
        writer.add_vision_image_size(224)
        writer.add_vision_image_mean([0.0, 0.0, 0.0])
        writer.add_vision_image_std([1.0, 1.0, 1.0])
    elif siglip:
        writer.add_clip_projector_type(VisionProjectorType.GEMMA3)
        writer.add_vision_image_size(vision["image_size"])
        merge = vision["image_size"] // vision["patch_size"] // int(config["mm_tokens_per_image"] ** 0.5)
        writer.add_vision_projector_scale_factor(merge)
        writer.add_vision_image_mean([0.5, 0.5, 0.5])
        writer.add_vision_image_std([0.5, 0.5, 0.5])
        writer.add_vision_use_gelu(True)
    elif mistral:
        writer.add_clip_projector_type(VisionProjectorType.PIXTRAL)
        writer.add_vision_image_size(vision["image_size"])
        writer.add_vision_image_mean([0.48145466, 0.4578275, 0.40821073])
        writer.add_vision_image_std([0.26862954, 0.26130258, 0.27577711])
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
        writer.add_vision_use_silu(True)
    else:
        writer.add_clip_projector_type(VisionProjectorType.QWEN3VL)
        writer.add_vision_image_size(int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"])
        size = json.loads((seeing / "preprocessor_config.json").read_text())["size"]
        writer.add_vision_min_pixels(size["shortest_edge"])
        writer.add_vision_max_pixels(size["longest_edge"])
        writer.add_vision_image_mean([0.5, 0.5, 0.5])
        writer.add_vision_image_std([0.5, 0.5, 0.5])
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        writer.add_vision_use_gelu(True)
        deep = vision.get("deepstack_visual_indexes", ())
        writer.add_vision_is_deepstack_layers([layer in deep for layer in range(depth)])
    tensors = (
        _mistral_tensors
        if mistral
        else _siglip_tensors
        if siglip
        else _unified_tensors
        if unified
        else _gemma_tensors
        if gemma
        else _tensors
    )
    for name, values in tensors(seeing, depth):
        fits = values.ndim > 1 and values.shape[-1] % 32 == 0 and not (gemma and "position" in name)
        packed = kind if fits else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(seeing: Path, depth: int) -> Iterator[tuple[str, Floats]]:
    known = get_tensor_name_map(MODEL_ARCH.MMPROJ, depth)
    deep = json.loads((seeing / "config.json").read_text())["vision_config"].get("deepstack_visual_indexes", ())
    parts = {"norm": MODEL_TENSOR.V_DS_NORM, "linear_fc1": MODEL_TENSOR.V_DS_FC1, "linear_fc2": MODEL_TENSOR.V_DS_FC2}
    own = {
        "visual.merger.norm": TENSOR_NAMES[MODEL_TENSOR.V_POST_NORM],
        "visual.merger.linear_fc1": TENSOR_NAMES[MODEL_TENSOR.V_MMPROJ].format(bid=0),
        "visual.merger.linear_fc2": TENSOR_NAMES[MODEL_TENSOR.V_MMPROJ].format(bid=2),
    }
    for place, layer in enumerate(deep):
        stem = f"visual.deepstack_merger_list.{place}."
        own |= {stem + part: TENSOR_NAMES[tensor].format(bid=layer) for part, tensor in parts.items()}
    for name, values in load_file(seeing / "model.safetensors").items():
        if not name.startswith("model.visual."):
            continue
        stem, _, end = name.removeprefix("model.").rpartition(".")
        here = own.get(stem) or known.get_name(stem)
        assert here is not None, name
        if values.ndim == 5:
            first, second = values[:, :, 0], values[:, :, 1]
            yield f"{here}.{end}", np.ascontiguousarray(first, np.float32)
            yield f"{here}.{end}.1", np.ascontiguousarray(second, np.float32)
        else:
            yield f"{here}.{end}", values.astype(np.float32)


def _siglip_tensors(seeing: Path, depth: int) -> Iterator[tuple[str, Floats]]:
    known = get_tensor_name_map(MODEL_ARCH.MMPROJ, depth)
    for whole, values in load_file(seeing / "model.safetensors").items():
        if whole.startswith("language_model."):
            continue
        name = whole.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        here = known.get_name(name, try_suffixes=(".weight", ".bias"))
        assert here is not None, name
        yield here, values.astype(np.float32) + np.float32("soft_emb_norm" in name)


def _mistral_tensors(seeing: Path, depth: int) -> Iterator[tuple[str, Floats]]:
    known = get_tensor_name_map(MODEL_ARCH.MMPROJ, depth)
    config = json.loads((seeing / "config.json").read_text())
    heads = config["vision_config"]["num_attention_heads"]
    for name, stored in load_file(seeing / "model.safetensors").items():
        values = stored.astype(np.float32)
        if name == "language_model.model.embed_tokens.weight":
            yield "v.token_embd.img_break", values[config["image_break_token_id"]]
        if name.startswith("language_model."):
            continue
        here = known.get_name(name.replace("linear_2", "linear_1"), try_suffixes=(".weight",))
        assert here is not None, name
        if ".q_proj." in name or ".k_proj." in name:
            pairs = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2)
            values = np.ascontiguousarray(pairs).reshape(values.shape)
        yield here.replace("mm.1", "mm.2") if "linear_2" in name else here, values


def _unified_tensors(seeing: Path, depth: int) -> Iterator[tuple[str, Floats]]:
    names = {
        "model.vision_embedder.patch_dense.": "v.patch_embd.",
        "model.vision_embedder.patch_ln1.": "v.patch_norm.1.",
        "model.vision_embedder.patch_ln2.": "v.patch_norm.2.",
        "model.vision_embedder.pos_norm.": "v.patch_norm.3.",
        "model.vision_embedder.pos_embedding": "v.position_embd.weight",
        "model.embed_vision.embedding_projection.": "mm.input_projection.",
    }
    for name, values in load_file(seeing / "model.safetensors").items():
        beginning = next((each for each in names if name.startswith(each)), None)
        if beginning is None:
            continue
        if name.endswith(("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias")):
            side = int((values.shape[-1] // 3) ** 0.5)
            pixels = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
            values = pixels.reshape(values.shape)  # noqa: PLW2901
        if name.endswith("pos_embedding"):
            values = values.swapaxes(0, 1)  # noqa: PLW2901
        yield names[beginning] + name.removeprefix(beginning), np.ascontiguousarray(values, np.float32)


def _gemma_tensors(seeing: Path, depth: int) -> Iterator[tuple[str, Floats]]:
    known = get_tensor_name_map(MODEL_ARCH.MMPROJ, depth)
    suffixes = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
    for whole, values in load_file(seeing / "model.safetensors").items():
        if not whole.startswith(("model.vision_tower.", "model.embed_vision.")):
            continue
        name = whole.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name += ".weight" if name.endswith("position_embedding_table") else ""
        here = known.get_name(name, try_suffixes=suffixes)
        assert here is not None, name
        if name.endswith("patch_embedder.input_proj.weight"):
            side = int((values.shape[1] // 3) ** 0.5)
            values = values.reshape(len(values), side, side, 3).transpose(0, 3, 1, 2)  # noqa: PLW2901
        yield here, np.ascontiguousarray(values.reshape(values.shape or (1,)), np.float32)
