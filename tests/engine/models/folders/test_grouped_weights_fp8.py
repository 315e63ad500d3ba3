"""Folders in FP8 with a scale for each block of 128 by 128: numbers and scales become one tensor, and other forms of
FP8 are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.folders.checkpoint import Checkpoint
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import needs_preparing
from engine.models.folders.weight_layout import layout_of
from engine.models.formats.model_files import Change, StoredTensor
from engine.runtimes.choosing import refuse_download
from tests.support.opened_experts import assert_all_bytes_counted, assert_same_values, experts_of
from tests.support.tiny_fp8 import write_fp8
from tests.support.tiny_models import write_tiny_model

GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 200, "moe_intermediate_size": 136, "mlp_only_layers": []}
    return write_tiny_model(tmp_path_factory.mktemp("source") / "qwen3_moe", "qwen3_moe", **sizes)


@pytest.fixture
def folder(tmp_path: Path, source: Path) -> Path:
    """In one file, to be changed."""
    return write_fp8(tmp_path / "model", source)[0]


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_settings(folder: Path, **settings: Any) -> dict[str, Any]:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config["quantization_config"] |= settings
    path.write_text(json.dumps(config))
    return config


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        open_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "scales", "strategy"),
    [(1, torch.float32, "block"), (3, torch.bfloat16, "block"), (1, torch.bfloat16, "channel"),
     (3, torch.float32, "tensor"), (3, torch.float16, "channel")],
)  # fmt: skip
def test_every_expert_is_what_its_tensors_stand_for(
    tmp_path: Path, source: Path, files: int, scales: torch.dtype, strategy: str
) -> None:
    folder, truth = write_fp8(tmp_path / "model", source, files=files, scales=scales, strategy=strategy)
    found, wanted = open_model(folder), open_model(truth)
    assert isinstance(found, Checkpoint) and found.experts is not None and found.experts.dtype == "BLOCK_FP8"
    assert_same_values(found.experts, wanted.experts)
    assert_all_bytes_counted(folder, found)
    trunk = {name: tensor.dtype for name, tensor in found.trunk()}
    assert trunk["model.layers.0.self_attn.q_proj.weight"] == "BLOCK_FP8"
    assert trunk["model.layers.0.mlp.gate.weight"] == trunk["lm_head.weight"] == "BF16"


def test_numbers_are_read_where_they_lie(folder: Path) -> None:
    opened = open_model(folder)
    (mapped,) = opened.mapped_files
    assert opened.experts is not None
    for tensor in (*opened.experts.expert(1, 3).parts, *(tensor for _, tensor in opened.trunk())):
        assert mapped.address <= tensor.words.ctypes.data < mapped.address + mapped.size


def test_the_layout_for_rings_has_every_byte_once(folder: Path) -> None:
    layout, opened = layout_of(folder), open_model(folder)
    assert opened.experts is not None and layout.trunk_bytes == opened.trunk_bytes
    numbers = {name: number for number, (name, _) in enumerate(layout.files)}
    for (layer, expert), runs in layout.experts.items():
        assert runs == opened.experts.place(layer, expert).runs(numbers)


def test_what_is_predicted_ahead_is_not_among_the_experts(tmp_path: Path) -> None:
    """Qwen 3.5 is published with layers of its own for that, whose experts have numbers from 0 on, too."""
    folder, _ = write_fp8(tmp_path / "model", write_tiny_model(tmp_path / "source", "qwen3_5_moe_text"))
    before = layout_of(folder).experts
    change_tensors(folder, lambda tensors: tensors.update({f"mtp.layers.0.mlp.experts.{number}.up_proj.weight":
                                                           torch.zeros(8, 8) for number in range(2)}))  # fmt: skip
    found = layout_of(folder)
    assert {key: sum(run.nbytes for run in runs) for key, runs in found.experts.items()} == {
        key: sum(run.nbytes for run in runs) for key, runs in before.items()
    }
    assert open_model(folder).experts is not None


def test_preparing_gains_nothing_and_it_may_be_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, why = needs_preparing(folder)
    assert not wanted and "used where they lie" in why
    monkeypatch.setattr("engine.runtimes.choosing.mlx_installed", lambda: False)
    refuse_download(json.loads((folder / "config.json").read_text()), 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"weight_block_size": None, "activation_scheme": "static"}, "FP8 with static scales of inputs"),
        ({"activation_scheme": "static"}, "FP8 with static scales of inputs"),
        ({"weight_block_size": [64, 128]}, r"FP8 with blocks of \[64, 128\]"),
        ({"fmt": "e5m2"}, "FP8 with numbers of the kind e5m2"),
        ({"quant_method": "fbgemm_fp8"}, "FBGEMM FP8"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors with an unnamed format"),
    ],
)
def test_other_forms_of_fp8_are_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr("engine.runtimes.choosing.mlx_installed", lambda: False)
    config = change_settings(folder, **settings)
    refused(folder, f"quantised with .*{text}, which does not run here; take a GGUF file")
    with pytest.raises(ModelError, match=text):
        refuse_download(config, 1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.update(format="marlin-24"), "the format marlin-24"),
        (lambda s: s.update(config_groups={}), "no groups"),
        (lambda s: s.update(kv_cache_scheme={"num_bits": 8}), "keys and values that are quantised, too"),
        (lambda s: s.update(sparsity_config={"format": "sparse-24-bitmask"}), "the sparse format sparse-24-bitmask"),
        (lambda s: s["config_groups"]["group_0"]["input_activations"].update(dynamic=False), "static scales of inputs"),
        (lambda s: s["config_groups"]["group_0"]["weights"].update(type="int"), "numbers of 8 bits and the type int"),
        (lambda s: s["config_groups"]["group_0"]["weights"].update(strategy="group"), "a scale for each group"),
        (
            lambda s: s["config_groups"]["group_0"]["weights"].update(strategy="block", block_structure=[64, 64]),
            r"blocks of \[64, 64\]",
        ),
    ],
)
def test_what_of_compressed_tensors_does_not_run_is_refused_by_name(
    tmp_path: Path, source: Path, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    folder, _ = write_fp8(tmp_path / "model", source, strategy="channel")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    change(settings)
    change_settings(folder, **settings)
    refused(folder, f"quantised with compressed-tensors with {text}, which does not run here")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(GATE + "_scale_inv"), f"{GATE} is quantised, but {GATE}_scale_inv is missing"),
        (lambda t: t.update({GATE + "_scale_inv": torch.ones(1, 2)}), f"{GATE} of shape .* does not fit to its scales"),
        (
            lambda t: t.update({GATE + "_scale_inv": torch.ones(2, 2, dtype=torch.int32)}),
            r"does not fit to its scales \(I32 \[2, 2\]\)",
        ),
        (lambda t: t.update({GATE: t[GATE].reshape(-1)}), "does not fit to its scales"),
        (lambda t: t.update({GATE: t[GATE].to(torch.float8_e5m2)}), "scale_inv is of no weight that is quantised"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], text: str
) -> None:
    change_tensors(folder, change)
    refused(folder, text)


def test_stacked_experts_begin_with_a_block(tmp_path: Path) -> None:
    """Granite's gate and up are rows of one tensor."""
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8}
    source = write_tiny_model(tmp_path / "source", "granitemoe", intermediate_size=256, **sizes)
    folder, truth = write_fp8(tmp_path / "model", source)
    assert_same_values(experts_of(folder), experts_of(truth))
    source = write_tiny_model(tmp_path / "odd", "granitemoe", intermediate_size=192, **sizes)
    torn, _ = write_fp8(tmp_path / "torn", source)
    experts = experts_of(torn)
    with pytest.raises(ModelError, match="192 rows that share a tensor do not begin with a block"):
        experts.place(0, 0)


def test_rows_keep_their_own_scales_in_another_order() -> None:
    words = np.arange(3 * 128, dtype=np.uint32).astype(np.uint8).reshape(3, 128)
    rows = np.array([2, 0, 1])
    for scales, wanted in (([[1.0], [2.0], [3.0]], [3.0, 1.0, 2.0]), ([[4.0]], [4.0])):
        stored = StoredTensor("BLOCK_FP8", words, StoredTensor("F32", np.array(scales, np.float32).view(np.uint32)))
        moved = Change(rows=rows).in_rows(stored)
        assert moved.scales is not None
        assert moved.scales.words.view(np.float32).ravel().tolist() == wanted
        assert (moved.words == words[rows]).all()


def test_rows_are_brought_into_another_order_with_their_scales() -> None:
    """Whole blocks of 128 rows, or rows of one block; others would have to share scales."""
    words = np.arange(300 * 128, dtype=np.uint32).astype(np.uint8).reshape(300, 128)
    scales = np.array([[1.0], [2.0], [3.0]], np.float32)
    stored = StoredTensor("BLOCK_FP8", words, StoredTensor("F32", scales.view(np.uint32)))
    rows = np.concatenate([np.arange(128, 256), np.arange(128)[::-1], np.arange(256, 300)])
    moved = Change(rows=rows).in_rows(stored)
    assert moved.scales is not None
    assert moved.scales.words.view(np.float32).ravel().tolist() == [2.0, 1.0, 3.0]
    assert (moved.words == words[rows]).all()
    with pytest.raises(ModelError, match="reordered within blocks of 128"):
        Change(rows=np.concatenate([np.arange(64), np.arange(128, 192), np.arange(64, 128)])).in_rows(stored)
