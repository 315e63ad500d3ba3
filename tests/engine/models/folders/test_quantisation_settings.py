"""Settings of quantised weights in files beside ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ModelError
from engine.models.folders.opening import open_model, read_config
from engine.models.folders.weight_layout import layout_of
from tests.support.opened_experts import assert_same_values
from tests.support.progress import quiet
from tests.support.tiny_gguf import whole_blocks
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_zero_points import Form, write_zero_points

AUTOGPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
            "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"}  # fmt: skip
AUTOAWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.23.0"},
            "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
                             "exclude_modules": ["lm_head"]}}  # fmt: skip
BESIDE: dict[str, tuple[str, dict[str, Any], Form]] = {
    "AutoGPTQ": ("quantize_config.json", AUTOGPTQ, Form("gptq", scales=torch.float16)),
    "AWQ in AutoGPTQ's file": (
        "quantize_config.json", {"bits": 4, "group_size": 32, "quant_method": "awq"},
        Form("awq", zeros=True, scales=torch.float16)),
    "AutoAWQ": ("quant_config.json", AUTOAWQ, Form("awq", zeros=True, scales=torch.float16)),
    "ModelOpt": ("hf_quant_config.json", MODELOPT, Form("modelopt")),
}  # fmt: skip


def without_settings(folder: Path) -> dict[str, Any]:
    """Takes the settings from ``config.json`` of ``folder``, and returns them."""
    config = json.loads((folder / "config.json").read_text())
    settings: dict[str, Any] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    return settings


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "qwen3_moe", "qwen3_moe", **whole_blocks("qwen3_moe"))


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_beside_the_configuration_has_the_settings(tmp_path: Path, source: Path, name: str) -> None:
    file, settings, form = BESIDE[name]
    folder, truth = write_zero_points(tmp_path / "model", source, form)
    without_settings(folder)
    (folder / file).write_text(json.dumps(settings))
    found, wanted = open_model(folder), open_model(truth)
    found.repack(quiet)
    assert found.experts is not None and wanted.experts is not None and found.experts.packed
    assert_same_values(found.experts, wanted.experts)


@pytest.mark.parametrize("name", BESIDE)
def test_without_that_file_its_name_is_told(tmp_path: Path, source: Path, name: str) -> None:
    file, _, form = BESIDE[name]
    folder, _ = write_zero_points(tmp_path / "model", source, form)
    without_settings(folder)
    with pytest.raises(ModelError, match=rf"config.json does not say, and neither does .*{file} .*; fetch the model"):
        open_model(folder)


def test_the_configuration_itself_comes_first(tmp_path: Path, source: Path) -> None:
    folder, _ = write_zero_points(tmp_path / "model", source, Form("awq", zeros=True, scales=torch.float16))
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 3, "quant_method": "aqlm"}))
    assert read_config(folder)["quantization_config"]["quant_method"] == "awq"
    assert open_model(folder).repacks


@pytest.mark.parametrize("key", ["compression_config", "unnamed"])
def test_settings_under_older_names_are_read(tmp_path: Path, source: Path, key: str) -> None:
    """Those of compressed-tensors, and ModelOpt's without a method."""
    form = Form("pack-quantized") if key == "compression_config" else Form("modelopt")
    folder, truth = write_zero_points(tmp_path / "model", source, form)
    settings = without_settings(folder)
    if key == "unnamed":
        del settings["quant_method"]
        key = "quantization_config"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: settings}))
    found, wanted = open_model(folder), open_model(truth)
    found.repack(quiet)
    assert found.experts is not None and wanted.experts is not None
    assert_same_values(found.experts, wanted.experts)


@pytest.mark.parametrize(
    ("file", "settings", "text"),
    [
        ("quantize_config.json", {"bits": 3, "group_size": 128}, "GPTQ with 3 bits"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMV"}, "AWQ with the packing GEMV"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "ModelOpt with FP8 and static scales"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "ModelOpt with the method W4A8_AWQ"),
        ("quantize_config.json", {"quant_method": []}, "an unnamed method"),
    ],
)  # fmt: skip
def test_what_such_a_file_says_is_refused_by_name(
    tmp_path: Path, source: Path, file: str, settings: dict[str, Any], text: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=f"quantised with {text}.*, which does not run here"):
        open_model(folder)


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"bits": 1' + "0" * 30 + "}", '{"a":' * 100 + "1" + "}" * 100], ids=range(4)
)
def test_a_damaged_file_is_a_sentence_with_its_name(tmp_path: Path, source: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "quantize_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"quantize_config\.json .*; fetch the model again") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_only_keys_and_values_are_no_quantised_weights(tmp_path: Path, source: Path) -> None:
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    )
    assert "quantization_config" not in read_config(tmp_path)


def test_the_layout_has_the_file_that_autogptq_called_otherwise(tmp_path: Path, source: Path) -> None:
    file, settings, form = BESIDE["AutoGPTQ"]
    folder, _ = write_zero_points(tmp_path / "model", source, form)
    without_settings(folder)
    (folder / file).write_text(json.dumps(settings))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    layout = layout_of(folder)
    assert [name for name, _ in layout.files] == ["gptq_model-4bit-32g.safetensors"]
    assert layout.trunk_bytes > 0 and np.prod([layout.count, len(layout.layers)]) == len(layout.experts)
    assert open_model(folder).repacks
