"""A GGUF file of a tower says what a folder of safetensors would, or is not used; damage is a sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.errors import ModelError
from engine.models.architectures.gguf_tower import added_to, heads_of, may_see, moved_axes, settings_of, tower_entries
from engine.models.formats.gguf_file import GgufFile
from tests.support.tiny_gguf_tower import write_tiny_tower
from tests.support.tiny_seeing import write_tiny_seeing

TOKENS = ["a", "b", "<|image_pad|>"]
CONFIG = {"model_type": "qwen3_5_text", "hidden_size": 48}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_seeing(tmp_path_factory.mktemp("seeing"), "qwen3_5")


@pytest.fixture
def tower(tmp_path: Path, seeing: Path) -> GgufFile:
    with GgufFile(write_tiny_tower(tmp_path / "mmproj.gguf", seeing)) as file:
        return file


def test_settings_are_those_of_the_folder(tower: GgufFile, seeing: Path) -> None:
    found = settings_of(tower, CONFIG, TOKENS)
    assert found is not None
    written = json.loads((seeing / "config.json").read_text())
    assert found.config["model_type"] == written["model_type"] and found.config["image_token_id"] == 2
    assert found.config["vision_config"] == {
        key: written["vision_config"][key] for key in found.config["vision_config"]
    }
    assert found.config["text_config"] == CONFIG
    assert found.processor == {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "min_pixels": 64, "max_pixels": 1024}


def test_what_is_read_of_a_qwen_with_deepstack(tmp_path: Path) -> None:
    seeing = write_tiny_seeing(tmp_path / "seeing", "qwen3_vl")
    with GgufFile(write_tiny_tower(tmp_path / "mmproj.gguf", seeing)) as file:
        found = settings_of(file, {"model_type": "qwen3_vl_moe_text", "hidden_size": 48}, TOKENS)
        assert settings_of(file, CONFIG, TOKENS) is None, "Qwen 3.5 reads no features of single layers"
        entries = tower_entries(file)
        file.metadata["clip.vision.is_deepstack_layers"] = [True, False, False, False]
        assert not any(".1." in name for name in tower_entries(file) if name.startswith("deepstack"))
    assert found is not None and found.config["model_type"] == "qwen3_vl_moe"
    assert found.config["vision_config"]["deepstack_visual_indexes"] == [0, 2]
    stored = [name for name in load_file(seeing / "model.safetensors") if name.startswith("model.visual.")]
    assert entries.keys() == {name.removeprefix("model.visual.") for name in stored}


@pytest.mark.parametrize("exchanged", [False, True])
def test_what_is_read_of_a_gemma_3(tmp_path: Path, exchanged: bool) -> None:
    seeing = write_tiny_seeing(tmp_path / "seeing", "gemma3")
    written = json.loads((seeing / "config.json").read_text())
    config = {"model_type": "gemma3_text", "hidden_size": 64}
    with GgufFile(write_tiny_tower(tmp_path / "mmproj.gguf", seeing)) as file:
        if exchanged:  # as files of early 2025 are
            other = {"up": "down", "down": "up"}
            renamed = {re.sub("(?<=ffn_)(up|down)", lambda end: other[end[0]], name): name for name in file.tensors}
            tensors = {name: file.tensors[old] for name, old in renamed.items()}
            file.tensors.clear()
            file.tensors.update(tensors)
        found = settings_of(file, config, ["<end_of_image>", "<start_of_image>"])
        assert settings_of(file, config, ["<image_soft_token>"]) is None
        entries = tower_entries(file)
        del file.metadata["clip.vision.projector.scale_factor"]
        usual = settings_of(file, config, ["<start_of_image>"])
    assert (
        found is not None and usual is not None and found.processor == {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    )
    assert [found.config[key] for key in ("boi_token_index", "eoi_token_index", "mm_tokens_per_image")] == [1, 0, 16]
    assert usual.config["mm_tokens_per_image"] == 4
    vision = found.config["vision_config"]
    assert vision == {key: written["vision_config"][key] for key in vision}
    stored = load_file(seeing / "model.safetensors")
    shapes = {name: values.shape for name, values in stored.items() if not name.startswith("language_model.")}
    assert {name: entry.shape for name, (entry,) in entries.items()} == shapes
    assert [name for name in entries if added_to(name)] == ["multi_modal_projector.mm_soft_emb_norm.weight"]


@pytest.mark.parametrize("family", ["ministral3", "mistral4", "llama"])
def test_what_is_read_of_a_mistral(tmp_path: Path, family: str) -> None:
    seeing = write_tiny_seeing(tmp_path / "seeing", "ministral3")
    written = json.loads((seeing / "config.json").read_text())
    config, tokens = {"model_type": family, "hidden_size": 48}, ["[IMG_END]", "[IMG]", "[IMG_BREAK]"]
    with GgufFile(write_tiny_tower(tmp_path / "mmproj.gguf", seeing)) as file:
        found = settings_of(file, config, tokens)
        assert settings_of(file, config, tokens[:2]) is None
        entries, heads = tower_entries(file), heads_of(file)
        file.metadata["clip.use_silu"] = False
        other = settings_of(file, config, tokens)
        del file.tensors["mm.patch_merger.weight"]
        assert settings_of(file, config, tokens) is None, "Pixtral merges no patches"
    assert found is not None and other is not None and other.config["vision_config"]["hidden_act"] == "gelu"
    named = ("image_token_index", "image_break_token_id", "image_end_token_id", "spatial_merge_size")
    assert [found.config[key] for key in named] == [1, 2, 0, 2] and found.config["model_type"] == "mistral3"
    vision = found.config["vision_config"]
    assert vision == {key: written["vision_config"][key] for key in vision}
    stored = load_file(seeing / "model.safetensors")
    shapes = {name: values.shape for name, values in stored.items() if not name.startswith("language_model.")}
    assert {name: entry.shape for name, (entry,) in entries.items()} == shapes
    turned = [name for name, (entry,) in entries.items() if moved_axes(name, entry.shape, heads)]
    assert len(turned) == 4 and all(".q_proj." in name or ".k_proj." in name for name in turned)


def test_what_is_read_of_a_gemma(tmp_path: Path) -> None:
    seeing = write_tiny_seeing(tmp_path / "seeing", "gemma4_e2b")
    written = json.loads((seeing / "config.json").read_text())
    config = {"model_type": "gemma4_text", "hidden_size": 48}
    tokens = ["<image|>", "<|image|>", "<|image>"]
    with GgufFile(write_tiny_tower(tmp_path / "mmproj.gguf", seeing)) as file:
        small = settings_of(file, config | {"hidden_size_per_layer_input": 20}, tokens)
        large = settings_of(file, config, tokens[:2])
        assert settings_of(file, CONFIG, TOKENS) is None
        entries = tower_entries(file)
    assert small is not None and large is not None
    vision = small.config["vision_config"]
    assert vision == {key: written["vision_config"][key] for key in vision}
    assert [small.config[key] for key in ("image_token_id", "boi_token_id", "eoi_token_id")] == [1, 2, 0]
    assert "boi_token_id" not in large.config and large.config["text_config"]["hidden_size"] == 48
    assert "use_bidirectional_attention" not in small.config["text_config"]
    assert large.config["text_config"]["use_bidirectional_attention"] == "vision"
    stored = load_file(seeing / "model.safetensors")
    beginnings = ("model.vision_tower.", "model.embed_vision.")
    assert entries.keys() == {name.removeprefix("model.") for name in stored if name.startswith(beginnings)}


def test_what_is_read_of_a_gemma_without_layers(tmp_path: Path) -> None:
    seeing = write_tiny_seeing(tmp_path / "seeing", "gemma4_unified")
    written = json.loads((seeing / "config.json").read_text())["vision_config"]
    config = {"model_type": "gemma4_text", "hidden_size": 48}
    with GgufFile(write_tiny_tower(tmp_path / "mmproj.gguf", seeing)) as file:
        found = settings_of(file, config, ["<|image|>"])
        entries = tower_entries(file)
        file.metadata["clip.vision.patch_size"] = 5
        with pytest.raises(ModelError, match="patches have 432 numbers"):
            settings_of(file, config, ["<|image|>"])
    assert found is not None and found.config["model_type"] == "gemma4_unified"
    vision = found.config["vision_config"]
    assert vision == {key: written[key] for key in vision}
    assert found.config["text_config"]["use_bidirectional_attention"] == "vision"
    stored = load_file(seeing / "model.safetensors")
    shapes = {
        name.replace("model.vision_embedder.", "").replace("model.embed_vision.", "multimodal_embedder."): values.shape
        for name, values in stored.items()
        if "vision" in name
    }
    assert entries.keys() == shapes.keys()
    for name, (entry,) in entries.items():
        axes = moved_axes(name, entry.shape, 1)
        assert (entry.shape if axes is None else axes[2]) == shapes[name]


@pytest.mark.parametrize(
    ("family", "sizes", "can"),
    [
        ("gemma3_text", {}, True),
        ("llama", {}, False),
        ("llama", {"head_dim": 128}, False),
        ("llama", {"head_dim": 128, "hidden_size": 5120}, True),
        ("qwen3", {"head_dim": 128, "hidden_size": 5120}, False),
        ("no family", {}, False),
    ],
)
def test_a_tower_is_looked_for_beside_models_that_can_have_one(family: str, sizes: dict[str, int], can: bool) -> None:
    assert may_see({"model_type": family, "num_attention_heads": 32, "hidden_size": 4096} | sizes) == can


def test_axes_are_moved_into_the_modules_order() -> None:
    colours = np.arange(2 * 12).reshape(2, 12)
    kept, order, shape = moved_axes("patch_dense.weight", (2, 12), 1) or ((), (), ())
    moved = colours.reshape(kept).transpose(order).reshape(shape)
    assert moved[0].tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert moved_axes("patch_ln2.weight", (12,), 1) is None
    assert moved_axes("pos_embedding", (2, 7, 5), 1) == ((2, 7, 5), (1, 0, 2), (7, 2, 5))


def test_all_tensors_have_a_place(tower: GgufFile, seeing: Path) -> None:
    stored = load_file(seeing / "model.safetensors")
    beginning = "model.visual."
    shapes = {name.removeprefix(beginning): values.shape for name, values in stored.items() if beginning in name}
    found = tower_entries(tower)
    assert found.keys() == shapes.keys()
    for name, entries in found.items():
        shape = entries[0].shape
        assert (shape if len(entries) == 1 else (*shape[:2], len(entries), *shape[2:])) == shapes[name]


@pytest.mark.parametrize(
    ("config", "tokens", "metadata"),
    [
        ({"hidden_size": 64}, TOKENS, {}),
        ({"model_type": "llama"}, TOKENS, {}),
        ({"model_type": "no family"}, TOKENS, {}),
        ({}, TOKENS[:2], {}),
        ({}, TOKENS, {"general.architecture": "qwen35"}),
        ({}, TOKENS, {"clip.projector_type": "pixtral"}),
        ({}, TOKENS, {"clip.vision.is_deepstack_layers": [False, True]}),
        ({"model_type": "qwen3_vl_text"}, TOKENS, {}),
    ],
)
def test_another_tower_is_not_used(
    tower: GgufFile, config: dict[str, Any], tokens: list[str], metadata: dict[str, Any]
) -> None:
    tower.metadata |= metadata
    assert settings_of(tower, CONFIG | config, tokens) is None


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"clip.vision.block_count": 0}, "block_count is 0"),
        ({"clip.vision.patch_size": "x"}, "patch_size is x"),
        ({"clip.vision.image_mean": [0.5, "x", 0.5]}, "colours"),
        ({"clip.vision.image_std": 7}, "colours"),
    ],
)
def test_damaged_settings_are_a_sentence(tower: GgufFile, metadata: dict[str, Any], said: str) -> None:
    tower.metadata |= metadata
    with pytest.raises(ModelError, match=said):
        settings_of(tower, CONFIG, TOKENS)


def test_a_missing_tensor_is_a_sentence(tower: GgufFile) -> None:
    del tower.tensors["v.patch_embd.weight.1"]
    with pytest.raises(ModelError, match=r"no tensor v\.patch_embd\.weight\.1"):
        tower_entries(tower)
