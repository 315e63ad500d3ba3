"""Prompts with pictures, for the runtimes and for transformers' own whole models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models.folders.prepare import prepare
from engine.pictures.folders import read_sight
from engine.pictures.picture import Picture
from engine.pictures.shown import ShownPictures
from engine.pictures.sight import Sight
from engine.runtimes.protocol import LoadedModel, Logits
from engine.runtimes.torch.tower import VisionTower
from tests.support.progress import quiet

Prompt = Sequence[int | Picture]


TRANSPOSED = ("qwen3_vl_moe",)
"""Tiny models whose experts are stored transposed."""


def as_native_runs(folder: Path) -> Path:
    """``folder``, or the copy that is prepared beside it, if the experts of its model are transposed."""
    copy = folder.with_name(f"{folder.name}-prepared")
    if folder.name in TRANSPOSED and not copy.exists():
        prepare(folder, copy, quiet)
    return copy if folder.name in TRANSPOSED else folder


def see(model: LoadedModel, folder: Path, *pictures: Picture) -> None:
    """Let ``model`` take pictures, with the rows of ``pictures``."""
    sight = read_sight(folder)
    assert sight is not None and model.takes_pictures
    model.pictures = ShownPictures(sight, model.facts.hidden)
    tower = VisionTower(folder, sight)
    for picture in pictures:
        model.pictures.show(picture)
        model.pictures.put(picture.digest, tower.rows(picture, quiet))


def tokens_of(model: LoadedModel, prompt: Prompt) -> list[int]:
    """The token ids of ``prompt``, of pictures those that the model gives them."""
    shown = model.pictures
    assert shown is not None
    return [token for part in prompt for token in (shown.show(part) if isinstance(part, Picture) else [part])]


def whole_logits(folder: Path, prompt: Prompt, most: int = 0) -> Logits:
    """The logits [tokens, vocabulary] of transformers' own whole model after each token of ``prompt``. ``most``: tokens
    of a picture, if not as the folder's files say. Run once for the same arguments, whichever runtime is compared."""
    return _whole_logits(folder, tuple(prompt), most)


@functools.cache
def _whole_logits(folder: Path, prompt: tuple[int | Picture, ...], most: int) -> Logits:
    model = _whole(folder)
    sight = read_sight(folder)
    assert sight is not None
    sight = replace(sight, most=most or sight.most)
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, Picture):
            grid = sight.grid(part.height, part.width)
            row = [*sight.between, *[model.config.image_token_id] * grid.columns]
            ids += (row * grid.rows)[len(sight.between) :]
        else:
            ids.append(part)
    tokens = torch.tensor([ids])
    inputs: dict[str, Any] = {"input_ids": tokens}
    if sight.family != "mistral3":
        types = "token_type_ids" if sight.family == "gemma3" else "mm_token_type_ids"
        inputs[types] = (tokens == model.config.image_token_id).int()
    pixels = [
        np.frombuffer(part.rgb, np.uint8).reshape(part.height, part.width, 3)
        for part in prompt
        if isinstance(part, Picture)
    ]
    if pixels:
        inputs |= {
            key: value
            for key, value in processor_of(sight)(pixels, return_tensors="pt").items()
            if key not in ("num_soft_tokens_per_image", "num_crops")
        }
    model.model.rope_deltas = None
    if sight.family == "gemma4_unified":
        # Its generation makes these masks. Without them its forward pass makes those of Gemma 3.
        inputs["attention_mask"] = model.create_masks_for_generate(
            model.config,
            torch.zeros(1, len(ids), model.config.text_config.hidden_size),
            None,
            None,
            torch.arange(len(ids))[None],
            inputs["mm_token_type_ids"],
        )
    with torch.inference_mode():
        logits: Logits = model(**inputs, use_cache=False).logits[0].float().numpy()
    logits.flags.writeable = False
    return logits


@functools.lru_cache(maxsize=4)
def _whole(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _unified(most: int) -> Callable[..., Any]:
    """The library's own processor for 12B needs torchvision. This one cuts small patches and merges them as that."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    small = Gemma4ImageProcessorPil(max_soft_tokens=most, patch_size=4)

    def processed(pictures: list[Any], return_tensors: str) -> dict[str, Any]:
        merged = []
        for picture in pictures:
            seen = small(picture, return_tensors=return_tensors)
            count = 9 * int(seen["num_soft_tokens_per_image"][0])
            patches, places = seen["pixel_values"][0, :count], seen["image_position_ids"][0, :count]
            columns, rows = (places.max(0).values + 1).tolist()
            image = torch.zeros(rows, columns, 4, 4, 3)
            for patch, (column, row) in zip(patches, places.tolist(), strict=True):
                image[row, column] = patch.reshape(4, 4, 3)
            squares = image.reshape(rows // 3, 3, columns // 3, 3, 4, 4, 3).permute(0, 2, 1, 4, 3, 5, 6)
            ys, xs = torch.meshgrid(torch.arange(rows // 3), torch.arange(columns // 3), indexing="ij")
            merged.append((squares.reshape(-1, 12 * 12 * 3), torch.stack((xs, ys), -1).reshape(-1, 2)))
        longest = max(len(patches) for patches, _ in merged)
        return {
            "pixel_values": torch.stack(
                [torch.nn.functional.pad(patches, (0, 0, 0, longest - len(patches))) for patches, _ in merged]
            ),
            "image_position_ids": torch.stack(
                [torch.nn.functional.pad(places, (0, 0, 0, longest - len(places)), value=-1) for _, places in merged]
            ),
        }

    return processed


def processor_of(sight: Sight) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if sight.family == "mistral3":
        return PixtralImageProcessorPil(size={"longest_edge": 240}, patch_size=8)
    if sight.family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    if sight.family == "gemma4":
        return Gemma4ImageProcessorPil(max_soft_tokens=sight.most, patch_size=4)
    if sight.family == "gemma4_unified":
        return _unified(sight.most)
    size = {"shortest_edge": 64, "longest_edge": 1024}
    half = [0.5] * 3
    return Qwen2VLImageProcessorPil(patch_size=4, size=size, image_mean=half, image_std=half)
