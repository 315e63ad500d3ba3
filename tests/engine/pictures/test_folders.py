"""A model folder sees pictures if its configuration and its files have a tower."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.errors import ModelError
from engine.pictures.folders import read_sight, tower_bytes, tower_tensors

CONFIG = {"model_type": "qwen3_5", "image_token_id": 7, "vision_config": {"patch_size": 16}}
TOWER = "model.visual.blocks.0.attn.qkv.weight"


def model(folder: Path, *names: str) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if names:
        save_file({name: np.zeros((2, 3), np.float32) for name in names}, folder / "model.safetensors")
    return folder


def test_a_folder_with_a_tower_sees(tmp_path: Path) -> None:
    folder = model(tmp_path, TOWER, "model.language_model.norm.weight")
    sight = read_sight(folder)
    assert sight is not None and sight.placeholder == 7
    tensors = tower_tensors(folder, sight)
    assert [*tensors] == ["blocks.0.attn.qkv.weight"]
    tensor = tensors["blocks.0.attn.qkv.weight"]
    assert tensor.path == folder / "model.safetensors" and tensor.shape == (2, 3)
    assert tower_bytes(folder, sight) == 24


def test_without_the_weights_of_a_tower_nothing_is_seen(tmp_path: Path) -> None:
    assert read_sight(model(tmp_path)) is None
    assert read_sight(model(tmp_path, "model.language_model.norm.weight")) is None


def test_a_quantised_tower_sees_nothing(tmp_path: Path) -> None:
    model(tmp_path)
    save_file({TOWER: np.zeros((2, 3), np.uint32)}, tmp_path / "model.safetensors")
    assert read_sight(tmp_path) is None


@pytest.mark.parametrize(("file", "inside"), [("preprocessor_config.json", False), ("processor_config.json", True)])
def test_settings_of_the_image_processor_are_read(tmp_path: Path, file: str, inside: bool) -> None:
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 10_240}}
    (tmp_path / file).write_text(json.dumps({"image_processor": settings} if inside else settings))
    sight = read_sight(model(tmp_path, TOWER))
    assert sight is not None and (sight.least, sight.most) == (1, 10)


def test_a_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"preprocessor_config\.json is damaged"):
        read_sight(model(tmp_path, TOWER))
