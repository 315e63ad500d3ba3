"""Plain checkpoints: the experts are transformers' own, and every damaged folder ends in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.models.architectures.composite import language_tensors
from engine.models.architectures.families import FAMILIES
from engine.models.architectures.record import renamed
from engine.models.folders.opening import open_model
from engine.models.formats.safetensors_files import TensorEntry
from tests.support.opened_experts import assert_same_values, experts_of
from tests.support.published_step import as_published
from tests.support.tiny_families import TINY_FAMILIES, TINY_MOE_FAMILIES, family_of
from tests.support.transformers_models import transformers_language_model

TinyModel = Callable[..., Path]


def reference_experts(folder: Path) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """Gate, up, down and biases of every expert, float32, taken from the modules of transformers' own model."""
    import torch

    model = transformers_language_model(folder, dtype=torch.float32)
    family = model.config.model_type
    layers = model.transformer.blocks if family == "dbrx" else model.model.layers
    found = {}
    for index, layer in enumerate(layers):
        experts = next((m for name, m in layer.named_modules() if f".{name}".endswith(".experts")), None)
        for expert in range(0 if experts is None else experts.num_experts):
            parts = _reference_parts(family, experts, expert)
            found[index, expert] = {name: part.detach().numpy() for name, part in parts.items()}
    return found


def _reference_parts(family: str, experts: Any, expert: int) -> dict[str, Any]:
    if family == "dbrx":
        rows = slice(expert * experts.ffn_hidden_size, (expert + 1) * experts.ffn_hidden_size)
        return {"gate": experts.mlp.w1[rows], "up": experts.mlp.v1[rows], "down": experts.mlp.w2[rows].T}
    if family.startswith("nemotron_h"):  # has no gates
        up = experts.up_proj[expert]
        return {"gate": up, "up": up, "down": experts.down_proj[expert]}
    fused, down = experts.gate_up_proj[expert], experts.down_proj[expert]
    if family == "gpt_oss":
        bias = experts.gate_up_proj_bias[expert]
        return {
            "gate": fused[:, 0::2].T, "up": fused[:, 1::2].T, "down": down.T,
            "gate_bias": bias[0::2], "up_bias": bias[1::2], "down_bias": experts.down_proj_bias[expert],
        }  # fmt: skip
    if family == "llama4_text":
        fused, down = fused.T, down.T
    gate, up = fused.chunk(2, dim=0)
    return {"gate": gate, "up": up, "down": down}


@pytest.mark.sampled
@pytest.mark.parametrize("family", TINY_MOE_FAMILIES)
def test_experts_are_those_of_transformers(tiny_model: TinyModel, family: str):
    folder = tiny_model(family)
    experts = experts_of(folder)
    reference = reference_experts(folder)
    assert {(layer, e) for layer in experts.layers for e in range(experts.count)} == reference.keys()
    for (layer, e), parts in reference.items():
        weights = experts.expert(layer, e)
        for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
            tensor = getattr(weights, name)
            assert (tensor is not None) == (name in parts)
            if tensor is not None:
                assert np.array_equal(tensor.words.view(np.float32), parts[name]), (layer, e, name)
    # An expert without a gate has one matrix for both.
    twice = ("up",) if family.startswith("nemotron_h") else ()
    total = sum(part.nbytes for parts in reference.values() for name, part in parts.items() if name not in twice)
    assert experts.nbytes == total
    assert experts.dtype == "F32"


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_trunk_and_experts_together_are_the_whole_checkpoint(tiny_model: TinyModel, family: str):
    folder = tiny_model(family)
    stored = load_file(folder / "model.safetensors")
    files = open_model(folder)
    trunk = dict(files.trunk())
    record = FAMILIES[family_of(family)]
    usual = {renamed(name, dict(record.stored_names)): array for name, array in stored.items()}
    for name, tensor in trunk.items():
        starts = (own + name.removeprefix(start) for own, start in record.stored_starts if name.startswith(start))
        stored_as = next((other for other in starts if other in usual), name)
        assert tensor.words.tobytes() == usual[stored_as].tobytes()
    experts = files.experts
    tables = sum(tensor.nbytes for _, tensor in files.tables())
    assert tables + files.trunk_bytes + (experts.nbytes if experts else 0) == sum(
        array.nbytes for array in stored.values()
    )
    assert files.trunk_bytes == sum(tensor.nbytes for tensor in trunk.values())
    assert (experts is None) == (family not in TINY_MOE_FAMILIES)
    assert files.config["model_type"] == family_of(family)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_shards_are_one_model(tiny_model: TinyModel, family: str):
    one, several = open_model(tiny_model(family)), open_model(tiny_model(family, shards=True))
    assert len(list(several.folder.glob("*.safetensors"))) > 2
    assert {name: t.words.tobytes() for name, t in one.trunk()} == {
        name: t.words.tobytes() for name, t in several.trunk()
    }
    assert_same_values(one.experts, several.experts)


def test_gate_and_up_are_one_view_where_they_lie_together(tiny_model: TinyModel):
    experts = experts_of(tiny_model("granitemoe"))
    weights = experts.expert(0, 1)
    assert weights.gate_up is not None
    assert np.array_equal(weights.gate_up.words, np.concatenate([weights.gate.words, weights.up.words]))
    assert weights.gate_up.words.flags.c_contiguous
    for family in ("mixtral", "gpt_oss", "llama4_text"):
        other = open_model(tiny_model(family)).experts
        assert other is not None and other.expert(other.layers[0], 0).gate_up is None


def test_experts_fused_as_transformers_holds_them_are_read_too(tiny_model: TinyModel, tmp_path: Path):
    plain = experts_of(tiny_model("mixtral"))
    folder = copy_of(tiny_model("mixtral"), tmp_path)
    stored = load_file(folder / "model.safetensors")
    fused = {name.replace("block_sparse_moe", "mlp"): array for name, array in stored.items() if "experts" not in name}
    for layer in plain.layers:
        weights = [plain.expert(layer, e) for e in range(plain.count)]
        pairs = [np.concatenate([w.gate.words, w.up.words]).view(np.float32) for w in weights]
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(pairs)
        downs = [w.down.words.view(np.float32) for w in weights]
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack(downs)
    save_file(fused, folder / "model.safetensors")
    experts = experts_of(folder)
    assert_same_values(experts, plain)
    assert all(experts.expert(layer, each).gate_up is not None for layer in plain.layers for each in range(plain.count))


def test_step_is_read_as_it_is_published(tiny_model: TinyModel, tmp_path: Path):
    plain = open_model(tiny_model("step3p5"))
    folder = copy_of(tiny_model("step3p5"), tmp_path)
    stored = as_published(load_file(folder / "model.safetensors"))
    pictures = {
        name: np.ones((4, 4), np.float32) for name in ("vision_model.conv1.weight", "vit_large_projector.weight")
    }
    ahead = {"model.layers.5.eh_proj.weight": np.ones((4, 4), np.float32)}
    save_file(stored | pictures | ahead, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "step3p7", "text_config": text}))
    files = open_model(folder)
    assert {name: tensor.words.tobytes() for name, tensor in files.trunk()} == {
        name: tensor.words.tobytes() for name, tensor in plain.trunk()
    }
    assert_same_values(files.experts, plain.experts)


def test_layers_for_multi_token_prediction_are_left_out(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("deepseek_v3"), tmp_path)
    before = open_model(folder)
    stored = load_file(folder / "model.safetensors")
    last = max(before.experts.layers)
    extra = {name.replace(f".{last}.", ".3."): array for name, array in stored.items() if f"layers.{last}." in name}
    save_file(stored | extra, folder / "model.safetensors")
    after = open_model(folder)
    assert [name for name, _ in after.trunk()] == [name for name, _ in before.trunk()]
    assert after.experts is not None and after.experts.layers == before.experts.layers


def test_what_predicts_ahead_outside_the_layers_is_left_out(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("qwen3_next"), tmp_path)
    before = [name for name, _ in open_model(folder).trunk()]
    extra = {"mtp.norm.weight": np.ones(4, np.float32), "mtp.layers.0.mlp.experts.0.up_proj.weight": np.ones((4, 4))}
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors")
    assert [name for name, _ in open_model(folder).trunk()] == before


def test_two_tensors_of_one_name_in_the_language_model_are_refused():
    entry = TensorEntry("F32", (4,), 0, 16)
    twice = dict.fromkeys(("model.language_model.norm.weight", "language_model.model.norm.weight"), entry)
    for headers in ({"a": twice}, {name: {name: entry} for name in twice}):
        with pytest.raises(ModelError, match=r"holds the same weights .* as model\.language_model\.norm\.weight"):
            language_tensors(headers, {"model_type": "qwen3_5_text"})


def test_the_text_model_of_a_composite_llama4_is_found(tmp_path: Path):
    import torch
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    from tests.support.tiny_families import tiny_config

    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    }  # fmt: skip
    config = Llama4Config(vision_config=vision, text_config=tiny_config("llama4_text").to_dict())
    torch.manual_seed(0)
    model = Llama4ForConditionalGeneration._from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.language_model.model.layers[1].feed_forward.experts.gate_up_proj)
    model.save_pretrained(tmp_path)
    experts = open_model(tmp_path).experts
    assert experts is not None and experts.layers == (1, 3) and experts.count == 4
    fused = model.language_model.model.layers[1].feed_forward.experts.gate_up_proj[2].detach().numpy()
    assert np.array_equal(experts.expert(1, 2).up.words.view(np.float32), fused.T[56:])


def test_changed_files_are_noticed(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("mixtral"), tmp_path)
    experts = experts_of(folder)
    experts.check_unchanged()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(ModelError, match="was changed"):
        experts.check_unchanged()


def test_an_expert_that_is_not_there_is_a_mistake_of_the_caller(tiny_model: TinyModel):
    experts = experts_of(tiny_model("qwen2_moe"))
    for layer, expert in ((1, 0), (0, 6), (0, -1)):
        with pytest.raises(IndexError):
            experts.expert(layer, expert)


# --- damaged folders ----------------------------------------------------------------------------------------------


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refused(folder: Path, match: str, kind: str = "model") -> str:
    """The error with which ``folder`` is refused: one line that can be printed."""
    with pytest.raises(ModelError, match=match) as caught:
        open_model(folder)
    assert caught.value.kind == kind
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_no_folder_no_config_no_weights(tmp_path: Path):
    refused(tmp_path / "nowhere", "does not exist", kind="bad-input")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is not a folder", kind="bad-input")
    refused(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    refused(tmp_path, "has no safetensors files")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", pytest.param(b"[" * 50_000, id="deep"), b"<html>"])
def test_a_config_that_is_not_json(tmp_path: Path, text: bytes):
    (tmp_path / "config.json").write_bytes(text)
    refused(tmp_path, r"config\.json is damaged: it is not JSON")


def test_a_config_that_is_not_a_table(tmp_path: Path):
    (tmp_path / "config.json").write_text("[1]")
    refused(tmp_path, r"config\.json is damaged: it is not a table")


def test_an_unsupported_family_is_named_with_the_list(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("llama"), tmp_path)
    edit_config(folder, model_type="no_such_family")
    assert "mixtral" in refused(folder, "family 'no_such_family' are not supported")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    assert "convert the model to safetensors" in refused(tmp_path, f"only pickled weights .{name}.")


def test_remote_code_is_refused(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("llama"), tmp_path)
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    refused(folder, "auto_map.*never run")


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "FP8 with.*"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ with groups of None"),
        ({"quantization_config": {"quant_method": "awq", "bits": 5}}, "AWQ with 5 bits"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors with an unnamed format"),
        ({"compression_config": {"quant_method": "compressed-tensors", "format": "x"}}, "with the format x"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"_load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_algo": "W4A8_AWQ"}}, "ModelOpt with the method W4A8_AWQ"),
        ({"quantization": {"group_size": 64, "bits": 7}}, "mlx's method affine in 7 bits and groups of 64"),
        ({"quantization_config": [4]}, "an unnamed method"),
        ({"text_config": {"quantization_config": {"quant_method": "\x1b[2J"}}}, r".x1b.*"),
    ],
)
def test_quantised_checkpoints_are_refused_by_method(tiny_model: TinyModel, tmp_path: Path, setting: dict, name: str):
    folder = copy_of(tiny_model("llama"), tmp_path)
    edit_config(folder, **setting)
    refused(folder, f"quantised with .*{name}, which does not run here; take a GGUF file of the same model")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.layers.0.mlp.down_proj.qweight", "is quantised with GPTQ or AWQ, but config.json does not say"),
        ("model.layers.0.mlp.down_proj.weight.absmax", "quantised with bitsandbytes, which does not run"),
    ],
)
def test_names_of_quantised_tensors_are_recognised(tiny_model: TinyModel, tmp_path: Path, name: str, text: str):
    folder = copy_of(tiny_model("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors["model.norm.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    refused(folder, text)


def test_a_truncated_file(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("mixtral"), tmp_path)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    refused(folder, r"model\.safetensors is damaged: it is cut off")


def test_an_empty_file(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("llama"), tmp_path)
    os.truncate(folder / "model.safetensors", 0)
    refused(folder, r"model\.safetensors is damaged")


def test_a_missing_expert(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("mixtral"), tmp_path)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
    del stored[name]
    save_file(stored, folder / "model.safetensors")
    refused(folder, f"tensor {name} is missing")


def test_a_missing_bias(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("gpt_oss"), tmp_path)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.2.mlp.experts.down_proj_bias"]
    save_file(stored, folder / "model.safetensors")
    refused(folder, r"tensor model\.layers\.2\.mlp\.experts\.down_proj_bias is missing")


def test_experts_in_two_layouts(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("mixtral"), tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.experts.down_proj"] = np.zeros((8, 48, 56), np.float32)
    save_file(stored, folder / "model.safetensors")
    refused(folder, "layer 1 has its experts more than once")
    stored["model.layers.1.mlp.experts.5.w2.weight"] = np.zeros((48, 56), np.float32)
    save_file(stored, folder / "model.safetensors")
    refused(folder, "holds weights that another tensor holds too")


def test_a_wrong_shape(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("qwen3_moe"), tmp_path)
    edit_config(folder, moe_intermediate_size=41)
    refused(folder, r"gate_proj\.weight has shape \[40, 48\], but config.json asks for \[41, 48\]|\[48, 40\]")


def test_fewer_experts_or_layers_than_the_files_have(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("mixtral"), tmp_path)
    edit_config(folder, num_local_experts=7)
    refused(folder, "asks for 7 experts in the layers 0-2")
    edit_config(folder, num_local_experts=8, num_hidden_layers=2)
    refused(folder, "config.json gives the model 2 layers")
    edit_config(folder, num_local_experts="8", num_hidden_layers=3)
    refused(folder, "num_local_experts, which must be a whole number")


def test_experts_of_several_types(tiny_model: TinyModel, tmp_path: Path):
    folder = copy_of(tiny_model("mixtral"), tmp_path)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    stored[name] = stored[name].astype(np.float16)
    save_file(stored, folder / "model.safetensors")
    refused(folder, r"the experts of a layer have several types: .*F(16|32) and .*F(16|32); use another copy")
    for number in range(8):
        every = name.replace("experts.0", f"experts.{number}")
        stored[every] = stored[every].astype(np.float16)
    save_file(stored, folder / "model.safetensors")
    experts = experts_of(folder)
    assert [experts.expert(layer, 7).gate.dtype for layer in (0, 1)] == ["F16", "F32"]
    stored[name] = stored[name].astype(np.int16)
    save_file(stored, folder / "model.safetensors")
    refused(folder, "stored as I16, which cannot be run")


# --- the index of shards ------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return copy_of(tiny_model("mixtral", shards=True), tmp_path)


def index_of(folder: Path) -> Any:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def test_a_missing_shard(sharded: Path):
    shard = first_shard(sharded)
    shard.unlink()
    refused(sharded, f"{shard.name} is missing")


def test_a_missing_index(sharded: Path):
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, r"no model\.safetensors\.index\.json")


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map(sharded: Path, index: Any):
    write_index(sharded, index)
    refused(sharded, "is damaged: it has no weight_map")


def test_an_index_that_is_not_json(sharded: Path):
    (sharded / "model.safetensors.index.json").write_text("{")
    refused(sharded, "is damaged: it is not JSON")


def test_an_index_that_names_what_is_not_there(sharded: Path):
    index = index_of(sharded)
    index["weight_map"]["model.invented.weight"] = first_shard(sharded).name
    write_index(sharded, index)
    refused(sharded, r"Tensor model\.invented\.weight is not in")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "pytorch_model.bin", "a\x1b.safetensors"])
def test_an_index_cannot_name_other_files(sharded: Path, name: str):
    index = index_of(sharded)
    index["weight_map"]["x"] = name
    write_index(sharded, index)
    refused(sharded, "names the file|no weight_map")


def test_a_tensor_in_two_shards(sharded: Path):
    shards = sorted(sharded.glob("*.safetensors"))
    first, last = load_file(shards[0]), load_file(shards[-1])
    name = next(iter(first))
    save_file(last | {name: first[name]}, shards[-1])
    refused(sharded, f"Tensor {name} is both in")
