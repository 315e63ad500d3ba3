"""Quantised safetensors folders: codes, scales and biases become one tensor, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
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
from engine.models.folders.prepare import needs_preparing, prepare
from engine.models.folders.weight_layout import layout_of
from engine.models.formats.model_files import whole_bytes
from engine.runtimes.choosing import refuse_download
from tests.support.opened_experts import assert_all_bytes_counted, assert_same_values, experts_of, values_of
from tests.support.progress import quiet
from tests.support.tiny_gguf import whole_blocks
from tests.support.tiny_grouped import write_grouped
from tests.support.tiny_models import write_tiny_model

GATE = "model.layers.0.mlp.switch_mlp.gate_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    return write_tiny_model(folder / "qwen3_moe", "qwen3_moe", **whole_blocks("qwen3_moe"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("published")
    saved = write_tiny_model(folder / "source", "gpt_oss", **whole_blocks("gpt_oss"))
    return write_grouped(folder / "model", saved, form="published")


@pytest.fixture
def folder(tmp_path: Path, source: Path) -> Path:
    """Quantised by mlx-lm, in one file, to be changed."""
    return write_grouped(tmp_path / "model", source)[0]


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        open_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("files", [1, 4])
def test_every_expert_is_what_its_tensors_stand_for(tmp_path: Path, source: Path, files: int) -> None:
    """With several files, scales and biases may lie in others than their codes."""
    folder, truth = write_grouped(tmp_path / "model", source, files=files, bits=8, group=32)
    found, wanted = open_model(folder), open_model(truth)
    assert isinstance(found, Checkpoint) and found.experts is not None
    assert (found.experts.dtype, found.experts.count) == ("AFFINE8", 4)
    assert_same_values(found.experts, wanted.experts)
    assert_all_bytes_counted(folder, found)
    assert whole_bytes(found.experts) == found.experts.nbytes
    truth_trunk = dict(wanted.trunk())
    for name, stored in found.trunk():
        if stored.scales is not None:
            assert (values_of(stored) == truth_trunk[name].words.view(np.float32)).all()


def test_nvfp4_as_mlx_lm_writes_it(tmp_path: Path, source: Path) -> None:
    folder, truth = write_grouped(tmp_path / "model", source, mode="nvfp4", group=16)
    found, wanted = open_model(folder), open_model(truth)
    found.repack(quiet)
    assert found.experts is not None and found.experts.dtype == "GROUPED_NVFP4"
    assert_same_values(found.experts, wanted.experts)


def test_nothing_is_copied(folder: Path) -> None:
    opened = open_model(folder)
    (mapped,) = opened.mapped_files
    tensors = [tensor for _, tensor in opened.trunk()]
    assert opened.experts is not None
    tensors += opened.experts.expert(1, 3).parts
    for tensor in tensors:
        for part in (tensor, tensor.scales, tensor.biases):
            if part is not None:
                assert mapped.address <= part.words.ctypes.data < mapped.address + mapped.size


def test_gpt_oss_as_it_is_published(gpt_oss: tuple[Path, Path]) -> None:
    found, wanted = open_model(gpt_oss[0]), open_model(gpt_oss[1])
    assert found.experts is not None and wanted.experts is not None
    assert found.experts.dtype == "OCP_MXFP4"
    assert_same_values(found.experts, wanted.experts)
    for number in range(found.experts.count):
        ours, theirs = found.experts.expert(1, number), wanted.experts.expert(1, number)
        assert ours.gate_bias is not None and theirs.gate_bias is not None
        assert (ours.gate_bias.words.astype(np.uint32) << 16 == theirs.gate_bias.words).all()


def test_a_module_may_have_bits_and_groups_of_its_own(tmp_path: Path, source: Path) -> None:
    def own(module: str) -> tuple[int, int] | None:
        return (8, 32) if module.endswith("down_proj") else None

    folder, _ = write_grouped(tmp_path / "model", source, own=own)
    experts = experts_of(folder)
    expert = experts.expert(0, 0)
    assert (expert.gate.dtype, expert.down.dtype) == ("AFFINE4", "AFFINE8")
    assert expert.down.scales is not None and expert.down.scales.shape == (256, 8)


def test_the_layout_for_rings_has_every_byte_once(folder: Path, gpt_oss: tuple[Path, Path]) -> None:
    for one in (folder, gpt_oss[0]):
        layout, opened = layout_of(one), open_model(one)
        assert opened.experts is not None
        assert layout.trunk_bytes == opened.trunk_bytes
        numbers = {name: number for number, (name, _) in enumerate(layout.files)}
        for (layer, expert), runs in layout.experts.items():
            assert runs == opened.experts.place(layer, expert).runs(numbers)


def test_preparing_gains_nothing(folder: Path, gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    for one in (folder, gpt_oss[0]):
        wanted, why = needs_preparing(one)
        assert not wanted and "used where they lie" in why
        with pytest.raises(ModelError, match="packed weights, which are used where they lie"):
            prepare(one, tmp_path / "bank", lambda *_: None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"bits": 7, "group_size": 64}, "mlx's method affine in 7 bits and groups of 64, which does not run here"),
        ({"bits": 4, "group_size": 48}, "groups of 48"),
        ({"bits": 4, "group_size": 32, "mode": "nvfp4"}, "mlx's method nvfp4 in 4 bits and groups of 32"),
        ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, "mlx's method mxfp8"),
        ({"bits": True, "group_size": 64}, "in True bits"),
        ({"bits": 4, "group_size": 64, "lm_head": {"bits": 1, "group_size": 64}}, "in 1 bits"),
    ],
)
def test_what_of_mlx_does_not_run_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], text: str
) -> None:
    change_config(folder, quantization=settings, quantization_config=settings)
    refused(folder, text)
    monkeypatch.setattr("engine.runtimes.choosing.mlx_installed", lambda: False)
    with pytest.raises(ModelError, match=text):
        refuse_download(json.loads((folder / "config.json").read_text()), 1)


def test_what_runs_may_be_downloaded(folder: Path, gpt_oss: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtimes.choosing.mlx_installed", lambda: False)
    for one in (folder, gpt_oss[0]):
        refuse_download(json.loads((one / "config.json").read_text()), 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model_type": "phimoe"}, "mlx's affine method as mlx-lm stores the family"),
        ({"model_type": "qwen3_moe", "quantization_config": {"quant_method": "mxfp4"}, "quantization": None}, "MXFP4"),
    ],
)
def test_families_that_mlx_lm_stores_otherwise_are_refused_by_name(
    folder: Path, settings: dict[str, Any], text: str
) -> None:
    change_config(folder, **settings)
    refused(folder, text)


def test_missing_scales_are_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.__delitem__(GATE + ".scales"))
    refused(folder, rf"{GATE}\.weight is quantised, but {GATE}\.scales is missing")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({GATE + ".scales": tensors[GATE + ".scales"][:, :, :1]}),
        lambda tensors: tensors.update({GATE + ".biases": tensors[GATE + ".biases"].float()}),
        lambda tensors: tensors.update({GATE + ".scales": tensors[GATE + ".scales"].to(torch.int32)}),
        lambda tensors: tensors.update({GATE + ".weight": tensors[GATE + ".weight"][:, :, :5]}),
        lambda tensors: tensors.update({GATE + ".weight": tensors[GATE + ".weight"].flatten()}),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    change_tensors(folder, change)
    refused(folder, rf"tensor {GATE}\.weight of shape .* does not fit to its scales")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.update(x_blocks=t["x_blocks"][..., :8]), "x_blocks of shape .* does not fit to its scales"),
        (lambda t: t.update(x_scales=t["x_scales"][:, :, :1]), "x_blocks of shape .* does not fit to its scales"),
        (
            lambda t: t.pop("x_scales"),
            "x_blocks is quantised, but x_scales is missing",
        ),
    ],
)
def test_published_blocks_that_do_not_fit_are_refused(
    gpt_oss: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], text: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(gpt_oss[0], folder)
    prefix = "model.layers.1.mlp.experts.down_proj"

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        short = {"x_blocks": tensors.pop(prefix + "_blocks"), "x_scales": tensors.pop(prefix + "_scales")}
        change(short)
        tensors.update({name.replace("x", prefix): tensor for name, tensor in short.items()})

    change_tensors(folder, renamed)
    refused(folder, text.replace("x_", prefix + "_"))


def test_bits_that_the_configuration_does_not_name_are_noticed(tmp_path: Path, source: Path) -> None:
    """Four bits in groups of 64 have as many words for a scale as eight bits in groups of 32."""
    folder, _ = write_grouped(tmp_path / "model", source, bits=8, group=32)
    settings = {"bits": 4, "group_size": 64}
    change_config(folder, quantization=settings, quantization_config=settings)
    refused(folder, "has shape .*, but config.json asks for")
