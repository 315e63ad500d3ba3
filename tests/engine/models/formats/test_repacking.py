"""Weights with zero points, as vLLM's tools store them, are what their descriptions say, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.folders import checkpoint
from engine.models.folders.opening import open_model
from engine.models.folders.weight_layout import layout_of
from engine.models.formats.mapped_file import OwnMemory
from engine.runtimes.choosing import refuse_download
from tests.support.opened_experts import assert_same_values, values_of
from tests.support.progress import quiet
from tests.support.tiny_gguf import whole_blocks
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_zero_points import Form, write_zero_points

F16, F32 = torch.float16, torch.float32
FORMS = {
    "pack-quantized": Form("pack-quantized"),
    "pack-quantized, groups of 128": Form("pack-quantized", group=128, scales=F16),
    "pack-quantized, zero points": Form("pack-quantized", group=64, zeros=True),
    "pack-quantized, rows": Form("pack-quantized", group=-1),
    "pack-quantized, 8 bits": Form("pack-quantized", bits=8, group=-1),
    "pack-quantized, 8 bits, zero points": Form("pack-quantized", bits=8, group=32, zeros=True, scales=F16),
    "int-quantized": Form("int-quantized", bits=8, group=-1),
    "int-quantized, zero points": Form("int-quantized", bits=8, group=-1, zeros=True),
    "int-quantized, one scale": Form("int-quantized", bits=8, group=-1, per_tensor=True, scales=F16),
    "AWQ": Form("awq", zeros=True, scales=F16),
    "AWQ, rows": Form("awq", group=-1, zeros=True, scales=F16),
    "GPTQ": Form("gptq", scales=F16),
    "GPTQ, zero points": Form("gptq", group=64, zeros=True, scales=F16),
    "GPTQ, version 2": Form("gptq", group=128, zeros=True, scales=F16, version="gptq_v2"),
    "GPTQ, 8 bits": Form("gptq", bits=8, group=-1, zeros=True, scales=F16),
    "NVFP4": Form("nvfp4-pack-quantized"),
    "NVFP4, ModelOpt": Form("modelopt"),
}
IN_PLACE = ("pack-quantized", "NVFP4", "NVFP4, ModelOpt")
"""Forms of which only biases, or what stands for them, are computed."""
EXPERT = "model.layers.1.mlp.experts.2.gate_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = whole_blocks("qwen3_moe") | {"moe_intermediate_size": 384}
    return write_tiny_model(tmp_path_factory.mktemp("source") / "qwen3_moe", "qwen3_moe", **sizes)


@pytest.mark.parametrize(("name", "files"), [(name, 1 + 2 * (place % 2)) for place, name in enumerate(FORMS)])
def test_every_weight_is_what_its_tensors_stand_for(tmp_path: Path, source: Path, name: str, files: int) -> None:
    form = FORMS[name]
    folder, truth = write_zero_points(tmp_path / "model", source, form, files=files)
    found, wanted = open_model(folder), open_model(truth)
    assert found.experts is not None and wanted.experts is not None
    assert found.experts.dtype == ("GROUPED_NVFP4" if form.in_nvfp4 else f"AFFINE{form.bits}") and found.repacks
    said = found.repack(quiet)
    assert any("round inputs" in line for line in said) == (form.kind == "int-quantized" or form.in_nvfp4)
    assert_same_values(found.experts, wanted.experts)
    truth_trunk = dict(wanted.trunk())
    grouped = {name for name, stored in found.trunk() if stored.scales is not None}
    assert "model.layers.0.self_attn.q_proj.weight" in grouped
    assert grouped.isdisjoint(("model.layers.0.mlp.gate.weight", "lm_head.weight"))
    for tensor, stored in found.trunk():
        if tensor in grouped:
            assert (values_of(stored) == truth_trunk[tensor].words.view(np.float32)).all()
    assert found.trunk_bytes == sum(stored.nbytes for _, stored in found.trunk())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GPTQ", "of weights in memory, which GPTQ stores otherwise."),
        ("AWQ", "of weights in memory, which AWQ stores otherwise."),
        ("int-quantized", "of weights in memory, which compressed-tensors stores otherwise."),
        ("pack-quantized", "of scales and biases in memory, which compressed-tensors stores otherwise."),
        ("NVFP4", None),
    ],
)
def test_the_person_is_told_of_much_that_is_computed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None
) -> None:
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS[name])
    assert not any("GB" in line for line in open_model(folder).repack(quiet))
    monkeypatch.setattr(checkpoint, "_WORTH_SAYING", 1)
    said = [line for line in open_model(folder).repack(quiet) if "GB" in line]
    assert said == ([] if text is None else [f"Loading made 0.0 GB {text}"])


def test_a_model_that_is_read_where_it_lies_takes_no_memory(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, nbytes: int) -> None:
        raise AssertionError(f"{nbytes} bytes of {name}")

    monkeypatch.setattr(checkpoint, "OwnMemory", refuse)
    opened = open_model(source)
    assert not opened.repacks and opened.repack(quiet) == []


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 80])
def test_memory_that_the_system_does_not_give_is_told(nbytes: int) -> None:
    with pytest.raises(ModelError, match=r"does not give \d+\.\d GB of memory for repacked weights .*; close") as error:
        OwnMemory("repacked weights", nbytes)
    assert error.value.kind == "memory"


@pytest.mark.parametrize("name", ["AWQ", *IN_PLACE])
def test_only_what_lies_otherwise_is_computed(tmp_path: Path, source: Path, name: str) -> None:
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS[name])
    opened = open_model(folder)
    (mapped,) = opened.mapped_files
    assert opened.experts is not None
    gate = opened.experts.expert(1, 3).gate
    assert gate.scales is not None and gate.biases is not None
    in_file = [mapped.address <= part.words.ctypes.data < mapped.address + mapped.size
               for part in (gate, gate.scales, gate.biases)]  # fmt: skip
    assert in_file == ([True, True, False] if name in IN_PLACE else [False] * 3)


def test_a_node_computes_its_own_experts_only(tmp_path: Path, source: Path) -> None:
    folder, truth = write_zero_points(tmp_path / "model", source, FORMS["GPTQ"])
    found, wanted = open_model(folder), open_model(truth)
    assert found.experts is not None and wanted.experts is not None
    done: list[int] = []
    found.repack(lambda stage, at, total, unit: done.append(total), {0: (), 1: (2,)}, trunk=False)
    assert set(done) == {found.experts.place(1, 2).nbytes}
    assert (values_of(found.experts.expert(1, 2).up) == wanted.experts.expert(1, 2).up.words.view(np.float32)).all()
    assert not values_of(found.experts.expert(1, 1).up).any()
    found.repack(quiet)
    assert found.repack(quiet) == [] and values_of(found.experts.expert(1, 1).up).any()


def test_modules_that_are_left_out_stay_plain(tmp_path: Path, source: Path) -> None:
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS["AWQ"], kept=lambda name: "self_attn" in name)
    formats = {name: stored.dtype for name, stored in open_model(folder).trunk()}
    assert formats["model.layers.0.self_attn.q_proj.weight"] == "BF16"


def test_the_layout_for_rings_has_the_bytes_as_they_are_stored(tmp_path: Path, source: Path) -> None:
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS["GPTQ, zero points"], files=3)
    layout = layout_of(folder)
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    nbytes = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers.1.mlp.experts.2." in name)
    assert sum(run.nbytes for run in layout.experts[1, 2]) == nbytes
    assert layout.trunk_bytes == sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." not in name)


# --- what does not run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "change", "text"),
    [
        ("GPTQ", {"desc_act": True}, r"GPTQ with rows in the order of activations \(desc_act\)"),
        ("GPTQ", {"bits": 3}, "GPTQ with 3 bits"),
        ("GPTQ", {"group_size": 16}, "GPTQ with groups of 16"),
        ("GPTQ", {"checkpoint_format": "marlin"}, "GPTQ with the packing marlin"),
        ("GPTQ", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"GPTQ with settings of their own for some modules"),
        ("AWQ", {"version": "gemv"}, "AWQ with the packing gemv"),
        ("AWQ", {"bits": 8}, "AWQ with 8 bits"),
        ("AWQ", {"group_size": 48}, "AWQ with groups of 48"),
        ("pack-quantized", {"format": "marlin-24"}, "compressed-tensors with the format marlin-24"),
        ("pack-quantized", {"weights.num_bits": 3}, "numbers of 3 bits and the type int"),
        ("pack-quantized", {"weights.actorder": "group"}, r"columns in the order of activations \(actorder\)"),
        ("pack-quantized", {"weights.strategy": "block"}, "a scale for each block"),
        ("pack-quantized", {"weights.group_size": 100}, "groups of 100"),
        ("int-quantized", {"weights.strategy": "group"}, "a scale for each group"),
        ("NVFP4", {"weights.group_size": 32}, "groups of 32"),
        ("NVFP4", {"format": "mxfp4-pack-quantized"}, "the format mxfp4-pack-quantized"),
        ("NVFP4, ModelOpt", {"quant_algo": "FP8"}, "ModelOpt with FP8 and static scales of inputs"),
    ],
)
def test_what_does_not_run_is_refused_by_name(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, form: str, change: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr("engine.runtimes.choosing.mlx_installed", lambda: False)
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS[form])
    config = json.loads((folder / "config.json").read_text())
    for key, value in change.items():
        inner = config["quantization_config"]
        if "." in key:
            inner = inner["config_groups"]["group_0"]["weights"]
        inner[key.removeprefix("weights.")] = value
    (folder / "config.json").write_text(json.dumps(config))
    for refuse in (lambda: open_model(folder), lambda: refuse_download(config, 1)):
        with pytest.raises(ModelError, match=f"quantised with .*{text}.*, which does not run here; take a GGUF file"):
            refuse()


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["GPTQ", "pack-quantized"])
def test_columns_in_the_order_of_activations_are_refused(tmp_path: Path, source: Path, name: str) -> None:
    """Where the settings do not say so, too."""
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS[name])
    ending = "g_idx" if name == "GPTQ" else "weight_g_idx"
    order = (torch.arange(256).flip(0) // 32).int()
    change_tensors(folder, lambda tensors: tensors.update({f"{EXPERT}.{ending}": order}))
    with pytest.raises(ModelError, match=r"columns of model.* are quantised in the order of activations"):
        open_model(folder).repack(quiet)


def test_an_order_of_activations_that_changes_nothing_runs(tmp_path: Path, source: Path) -> None:
    folder, truth = write_zero_points(tmp_path / "model", source, FORMS["GPTQ, 8 bits"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))
    found, wanted = open_model(folder), open_model(truth)
    found.repack(quiet)
    assert found.experts is not None and wanted.experts is not None
    assert (values_of(found.experts.expert(0, 0).down) == wanted.experts.expert(0, 0).down.words.view(np.float32)).all()


LARGE = 9000.0
"""A scale in half precision of which eight times is infinite."""


@pytest.mark.parametrize(
    ("name", "value"),
    [("GPTQ", np.inf), ("AWQ", np.nan), ("AWQ", np.inf), ("GPTQ, 8 bits", -np.inf), ("int-quantized, one scale", LARGE),
     ("pack-quantized, groups of 128", LARGE), ("pack-quantized, rows", np.nan), ("pack-quantized, rows", 3e38),
     ("int-quantized", np.inf), ("NVFP4", 0.0), ("NVFP4", np.nan), ("NVFP4, ModelOpt", np.inf),
     ("NVFP4, ModelOpt", 1e38)],
)  # fmt: skip
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, source: Path, name: str, value: float) -> None:
    """None at all, or none where the biases are kept in their format."""
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS[name])
    endings = (".scales", ".weight_global_scale", ".weight_scale_2")
    own = [part for part in load_file(folder / "model.safetensors") if part.startswith(EXPERT + ".")]
    changed = next((part for part in own if part.endswith(endings)), EXPERT + ".weight_scale")
    change_tensors(folder, lambda tensors: tensors[changed].view(-1)[-1:].fill_(value))
    with pytest.raises(ModelError, match=rf"Scales of {EXPERT}\.\w+ are no numbers.*; fetch the model again"):
        open_model(folder).repack(quiet)


@pytest.mark.parametrize("name", ["GPTQ", "AWQ"])
def test_large_scales_in_half_precision_with_zero_points_keep_their_biases(
    tmp_path: Path, source: Path, name: str
) -> None:
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS[name])
    change_tensors(folder, lambda tensors: tensors[f"{EXPERT}.scales"].fill_(LARGE))
    opened = open_model(folder)
    opened.repack(quiet)
    assert opened.experts is not None
    values = values_of(opened.experts.expert(1, 2).gate)
    assert np.isfinite(values).all() and np.abs(values).max() >= 7 * LARGE


@pytest.mark.parametrize("name", ["AWQ", "pack-quantized", "NVFP4"])
@pytest.mark.parametrize("together", [True, False])
def test_experts_that_a_family_stores_otherwise_are_refused_by_name(tmp_path: Path, name: str, together: bool) -> None:
    """Granite's are one tensor for all, which is not read if it is quantised, nor are they taken apart."""
    folder = write_tiny_model(tmp_path / "model", "granitemoe", num_hidden_layers=1)
    apart = [f"model.layers.0.block_sparse_moe.experts.{number}.{part}_proj.weight"
             for number in range(4) for part in ("gate", "up", "down")]  # fmt: skip

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in [part for part in tensors if part.endswith("_linear.weight")]:
            stored = tensors.pop(part)
            if together:
                tensors[part] = torch.zeros(*stored.shape[:-1], stored.shape[-1] // 2, dtype=torch.uint8)
        if not together:
            tensors |= {part: torch.zeros(8, 8) for part in apart}

    change_tensors(folder, change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FORMS[name].settings([])}))
    with pytest.raises(ModelError, match="as it stores experts of the family granitemoe, which does not run here"):
        open_model(folder)


@pytest.mark.parametrize("name", ["AWQ", "GPTQ", "pack-quantized, zero points", "int-quantized", "NVFP4, ModelOpt"])
def test_damaged_tensors_are_refused_in_one_sentence(tmp_path: Path, source: Path, name: str) -> None:
    folder, _ = write_zero_points(tmp_path / "model", source, FORMS[name])
    tensors = load_file(folder / "model.safetensors")
    own = sorted(part for part in tensors if part.startswith(EXPERT + ".") and not part.endswith("weight_shape"))
    dtypes = (torch.int32, torch.int8, torch.uint8, torch.float16, torch.float32, torch.int64)

    @settings(max_examples=40, deadline=None)
    @given(
        part=st.sampled_from(own),
        shape=st.lists(st.sampled_from((0, 1, 2, 3, 8, 32, 48, 256, 384)), max_size=3),
        dtype=st.sampled_from(dtypes),
        gone=st.booleans(),
    )
    def changed(part: str, shape: list[int], dtype: torch.dtype, gone: bool) -> None:
        damaged = dict(tensors)
        damaged[part] = torch.zeros(shape, dtype=dtype)
        if gone:
            del damaged[part]
        save_file(damaged, folder / "model.safetensors")
        same = not gone and (damaged[part].shape, dtype) == (tensors[part].shape, tensors[part].dtype)
        try:
            open_model(folder).repack(quiet)
        except ModelError as error:
            assert "\n" not in str(error) and EXPERT in str(error)
            assert not same or part.endswith("g_idx")
        else:
            optional = part.endswith(("g_idx", "zero_point", "input_scale"))
            optional |= damaged.get(part, torch.zeros(2)).numel() == 1 == tensors[part].numel()
            gone |= optional
            scales = part.endswith("scale") and dtype in (torch.float16, torch.float32)
            scales |= part.endswith("scales") and dtype in (torch.float16, torch.float32)
            assert same or (gone and optional) or scales or damaged[part].shape == tensors[part].shape

    changed()
