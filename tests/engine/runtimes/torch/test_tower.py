"""The rows that a tower makes of a picture are those of transformers' own whole model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from engine.errors import Cancelled, ModelError
from engine.models.store.gguf_folder import open_gguf
from engine.pictures.folders import read_sight
from engine.runtimes.torch.tower import STAGE, VisionTower
from tests.engine.runtimes.seeing_oracle import processor_of
from tests.support.progress import quiet
from tests.support.tiny_gguf import whole_blocks, write_tiny_gguf
from tests.support.tiny_gguf_metadata import PLACEHOLDER
from tests.support.tiny_gguf_tower import write_tiny_tower
from tests.support.tiny_models import write_tiny_model
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
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    pixels = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
    with torch.inference_mode():
        if model.config.model_type == "gemma4_unified":
            sight = read_sight(folder)
            assert sight is not None
            seen = processor_of(sight)([pixels], return_tensors="pt")
            found = model.model.get_image_features(seen["pixel_values"], seen["image_position_ids"])
        elif model.config.model_type == "gemma3":
            seen = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})(pixels, return_tensors="pt")
            found = model.model.get_image_features(seen["pixel_values"])
        elif model.config.model_type == "mistral3":
            seen = PixtralImageProcessorPil(size={"longest_edge": 240}, patch_size=8)(pixels, return_tensors="pt")
            found = model.model.get_image_features(seen["pixel_values"], seen["image_sizes"])
        elif model.config.model_type == "gemma4":
            seen = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4)(pixels, return_tensors="pt")
            found = model.model.get_image_features(seen["pixel_values"], seen["image_position_ids"])
        else:
            processor = Qwen2VLImageProcessorPil(
                patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}, image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
            )  # fmt: skip
            seen = processor(pixels, return_tensors="pt")
            found = model.model.get_image_features(seen["pixel_values"], seen["image_grid_thw"])
    deep = [each[0] for each in getattr(found, "deepstack_features", ())]
    return torch.cat((found.pooler_output[0], *deep), dim=1).numpy()


@pytest.mark.parametrize("kind", TINY_SEEING)
@pytest.mark.parametrize(("height", "width"), [(40, 24), (7, 61), (16, 16)])
def test_rows_are_the_librarys(folders: dict[str, Path], kind: str, height: int, width: int) -> None:
    picture = random_picture(height, width)
    rows = tower(folders[kind]).rows(picture, ignored)
    sight = read_sight(folders[kind])
    expected = reference(folders[kind], picture)
    assert sight is not None and rows.shape == expected.shape and len(rows) == sight.grid(height, width).seen
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


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma4"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_gpu_without_room_leaves_the_picture_to_the_cpu(
    folders: dict[str, Path], kind: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory runs out while the weights are moved (at 1), or in the first layer (at 2)."""
    sight, picture = read_sight(folders[kind]), random_picture(16, 16)
    assert sight is not None
    expected = VisionTower(folders[kind], sight).rows(picture, ignored)
    moved, move = list[str](), torch.nn.Module.to

    def to(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        moved.append(device.type)
        if moved == ["cuda"] and at == 1:
            raise torch.OutOfMemoryError("no room")
        return move(module, "cpu")

    def no_room(*_: object) -> None:
        if moved == ["cuda"] and at == 2:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.nn.Module, "to", to)
    opened = VisionTower(folders[kind], sight, "cuda")
    assert (opened.rows(picture, no_room) == expected).all() and moved == ["cuda", "cpu"]
    assert (opened.rows(picture, ignored) == expected).all() and moved == ["cuda", "cpu", "cpu"]


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


@pytest.mark.parametrize("kind", ["gemma3", "ministral3"])
def test_a_tower_as_mlx_stores_it_is_the_same(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder, picture = tmp_path / "mlx", random_picture(40, 24)
    shutil.copytree(folders[kind], folder)
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): (
            each.permute(0, 2, 3, 1).contiguous() if each.dim() == 4 else each
        )
        for name, each in load_file(folder / "model.safetensors").items()
    }
    assert sum(each.dim() == 4 for each in tensors.values()) == 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert (tower(folder).rows(picture, ignored) == tower(folders[kind]).rows(picture, ignored)).all()


# --- the tower of a GGUF file -----------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file of the language model alone."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    source = write_tiny_model(tmp_path / "language", "qwen3_5_text")
    return write_tiny_gguf(tmp_path / "tiny-Q8_0.gguf", source, "qwen35")


@pytest.mark.parametrize(("kind", "apart"), [("F32", 3e-6), ("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 5e-2)])
def test_rows_of_a_gguf_tower_are_the_librarys(folders: dict[str, Path], beside: Path, kind: str, apart: float) -> None:
    write_tiny_tower(beside.with_name(f"mmproj-{kind}.gguf"), folders["qwen3_5"], GGMLQuantizationType[kind])
    folder, picture = open_gguf(beside, quiet), random_picture(40, 24)
    sight, seeing = read_sight(folder), read_sight(folders["qwen3_5"])
    assert sight is not None and seeing is not None and sight.placeholder == PLACEHOLDER
    assert replace(sight, sections=seeing.sections) == seeing
    rows = VisionTower(folder, sight).rows(picture, ignored)
    expected = reference(folders["qwen3_5"], picture)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=apart * np.abs(expected).max())


def test_a_gguf_file_sees_with_the_tower_that_lies_beside_it_now(folders: dict[str, Path], beside: Path) -> None:
    assert read_sight(open_gguf(beside, quiet)) is None
    tower = write_tiny_tower(beside.with_name("mmproj-model-f16.gguf"), folders["qwen3_5"])
    assert read_sight(open_gguf(beside, quiet)) is not None
    tower.write_bytes(tower.read_bytes()[:2000])
    tower.rename(beside.with_name("mmproj-BF16.gguf"))
    assert read_sight(open_gguf(beside, quiet)) is None, "a damaged tower is left out"
    beside.with_name("mmproj-BF16.gguf").unlink()
    write_tiny_tower(beside.with_name("mmproj-F16.gguf"), folders["qwen3_5"], width=64)
    assert read_sight(open_gguf(beside, quiet)) is None, "it is another model's"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "architecture"), [("qwen3_5", "qwen35"), ("gemma3", "gemma3"), ("ministral3", "mistral3")]
)
def test_llama_cpp_makes_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, architecture: str
) -> None:
    """Its attention rounds to float16. The picture has a size that neither changes."""
    from tests.support.prebuilt_llama_cpp import tower_rows

    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    family = "ministral3" if kind == "ministral3" else f"{kind}_text"
    whole = whole_blocks(family)
    seeing = write_tiny_seeing(tmp_path / "seeing", kind, **whole)
    source = write_tiny_model(tmp_path / "l", family, **whole)
    model = write_tiny_gguf(tmp_path / "m.gguf", source, architecture)
    tower_file = write_tiny_tower(tmp_path / "mmproj-F32.gguf", seeing)
    folder, picture = open_gguf(model, quiet), random_picture(32, 32)
    rows = tower(folder).rows(picture, ignored)
    sight = read_sight(folder)
    assert sight is not None
    grid, theirs = sight.grid(32, 32), tower_rows(model, tower_file, picture)
    # It gives rows for the text between rows of the picture, too.
    assert len(theirs) == grid.tokens
    seen = theirs[[grid.place(number) for number in range(grid.seen)]]
    np.testing.assert_allclose(rows, seen, rtol=0, atol=2e-3 * np.abs(rows).max())
