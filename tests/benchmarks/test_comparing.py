"""The comparison runs from end to end on a model small enough for a test."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks.compare import main, model_subject
from benchmarks.gguf_export import half_rotation, write_gguf
from benchmarks.looking import main as look
from benchmarks.plain_export import write_plain
from benchmarks.synthetic import MixtralShape, bf16_words, write_synthetic
from engine.models.prepare import prepare

TINY = MixtralShape(layers=2, hidden=256, ffn=320, experts=4, heads=2, key_value_heads=1, vocabulary=500)


def test_the_synthetic_model_is_as_large_as_it_says(tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "model", TINY)
    file = folder / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    # nbytes leaves out the last norm.
    assert file.stat().st_size - 8 - header == TINY.nbytes + 2 * TINY.hidden
    written = file.stat().st_mtime_ns
    write_synthetic(folder, TINY)
    assert file.stat().st_mtime_ns == written


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.0, 0.0], dtype=np.float32)
    assert [hex(word) for word in bf16_words(values)] == ["0x3f80", "0x3f80", "0x3f82", "0xbf80", "0x0"]


def test_half_rotation_pairs_what_was_in_two_halves() -> None:
    rows = np.arange(8, dtype=np.uint16)[:, None]
    assert half_rotation(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_gguf_holds_the_same_words(tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "model", TINY)
    reader = gguf.GGUFReader(write_gguf(folder, tmp_path / "model.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(folder / "model.safetensors", framework="pt") as source:
        name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
        expected = source.get_tensor(name).view(torch.uint16).numpy()
    stacked = tensors["blk.1.ffn_down_exps.weight"].data.view(np.uint16)
    assert stacked.shape == (TINY.experts, TINY.hidden, TINY.ffn)
    assert np.array_equal(stacked[3], expected)
    assert len(tensors) == 3 + 10 * TINY.layers


def test_a_prepared_model_becomes_the_plain_one_again(tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "model", TINY)
    prepared = tmp_path / "model.prepared"
    prepare(folder, prepared, lambda stage, done, total, unit: None)
    plain = write_plain(prepared, tmp_path / "plain")
    with safe_open(folder / "model.safetensors", "pt") as one, safe_open(plain / "model.safetensors", "pt") as other:
        assert set(one.keys()) == set(other.keys())
        assert all(one.get_tensor(name).equal(other.get_tensor(name)) for name in one.keys())  # noqa: SIM118
    subject = model_subject(prepared, tmp_path / "work", "A bank")
    assert subject.path_for("privatellm") == prepared
    assert subject.path_for("transformers") == subject.folder != prepared


def test_another_family_is_refused(tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "model", TINY)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "olmoe"}), encoding="utf-8")
    with pytest.raises(ValueError, match="is olmoe, not mixtral"):
        write_gguf(folder, tmp_path / "model.gguf")


@pytest.mark.slow
def test_all_engines_are_found_equal_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = ["privatellm", "transformers"]
    if importlib.util.find_spec("llama_cpp") is not None:
        engines.append("llama.cpp")
    result = tmp_path / "result.json"
    small = ["--models", "synthetic", "--hidden", "256", "--ffn", "320", "--layers", "1", "--work", str(tmp_path)]
    measures = ["--measures", "decode", "4 rows", "prefill 64"]
    arguments = [*small, *measures, "--rounds", "2", "--steps", "2", "--threads", "1", "--engines", *engines]
    assert main([*arguments, "--json", str(result), "--markdown"]) == 0
    (model,) = json.loads(result.read_text(encoding="utf-8"))["models"]
    variants = {comparison["variant"] for comparison in model["comparisons"]}
    assert variants >= {"privatellm", "transformers", "transformers-eager"}
    assert all(comparison["cosine"] > 0.998 for comparison in model["comparisons"])
    assert set(model["seconds"]) == variants
    assert set(model["seconds"]["privatellm"]) == {"decode", "4 rows", "prefill 64"}
    assert all(len(values) == 2 for measured in model["seconds"].values() for values in measured.values())
    assert "| 4 rows |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_cost_of_looking_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--models", "synthetic", "--hidden", "256", "--ffn", "320", "--layers", "1", "--work", str(tmp_path)]
    result = tmp_path / "result.json"
    assert look([*small, "--blocks", "2", "--threads", "1", "--json", str(result)]) == 0
    (model,) = json.loads(result.read_text(encoding="utf-8"))["models"]
    assert len(model["off"]) == len(model["on"]) == 2
    assert "| Synthetic Mixtral-shaped, 1 layer |" in capsys.readouterr().out
