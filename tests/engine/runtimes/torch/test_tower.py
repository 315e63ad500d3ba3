"""The rows that a tower makes of a picture are those of transformers' own whole model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import Cancelled, ModelError
from engine.pictures.folders import read_sight
from engine.runtimes.torch.tower import STAGE, VisionTower
from tests.support.tiny_seeing import TINY_SEEING, random_picture, write_tiny_seeing


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    return {kind: write_tiny_seeing(root / kind, kind) for kind in TINY_SEEING}


def tower(folder: Path) -> VisionTower:
    sight = read_sight(folder)
    assert sight is not None
    return VisionTower(folder, sight)


def ignored(*_: object) -> None:
    return


def reference(folder: Path, picture: Any) -> Any:
    """The same rows by the library's image processor and whole model."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    pixels = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
    with torch.inference_mode():
        if model.config.model_type == "gemma4":
            seen = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4)(pixels, return_tensors="pt")
            found = model.model.get_image_features(seen["pixel_values"], seen["image_position_ids"])
        else:
            processor = Qwen2VLImageProcessorPil(
                patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}, image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
            )  # fmt: skip
            seen = processor(pixels, return_tensors="pt")
            found = model.model.get_image_features(seen["pixel_values"], seen["image_grid_thw"])
    return found.pooler_output[0].numpy()


@pytest.mark.parametrize("kind", TINY_SEEING)
@pytest.mark.parametrize(("height", "width"), [(40, 24), (7, 61), (16, 16)])
def test_rows_are_the_librarys(folders: dict[str, Path], kind: str, height: int, width: int) -> None:
    picture = random_picture(height, width)
    rows = tower(folders[kind]).rows(picture, ignored)
    sight = read_sight(folders[kind])
    assert sight is not None and rows.shape == (sight.grid(height, width).tokens, 48)
    expected = reference(folders[kind], picture)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    other = tower(folders[kind]).rows(random_picture(height, width, seed=1), ignored)
    assert np.abs(rows - other).max() > 0.1 * np.abs(rows).max()


def test_looking_is_told_of_and_stopped(folders: dict[str, Path]) -> None:
    told = []
    opened = tower(folders["qwen3_5"])
    expected = opened.rows(random_picture(16, 16), lambda *said: told.append(said))
    assert told == [(STAGE, 0, 2, "layers"), (STAGE, 1, 2, "layers")]

    def stop(*_: object) -> None:
        raise Cancelled("Stopped.")

    with pytest.raises(Cancelled):
        opened.rows(random_picture(16, 16), stop)
    assert (opened.rows(random_picture(16, 16), ignored) == expected).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, name: tensors.pop(name), "is missing"),
        (lambda tensors, name: tensors.update({name: torch.zeros(3, 4)}), r"\[3, 4\]"),
        (lambda tensors, name: tensors.update({name: tensors[name] * float("nan")}), "no number"),
    ],
)
def test_damaged_weights_are_a_sentence(folders: dict[str, Path], tmp_path: Path, change: Any, said: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(folders["qwen3_5"], folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.visual.blocks.1.attn.proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        tower(folder).rows(random_picture(16, 16), ignored)
