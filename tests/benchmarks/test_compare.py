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

from benchmarks.compare import Bench, check_equal, main, memory_needed
from benchmarks.engines import KINDS
from benchmarks.first_touch import STATES
from benchmarks.first_touch import main as first_touch
from benchmarks.gguf_export import half_rotation, write_gguf
from benchmarks.looking import main as look
from benchmarks.measuring import IK, IK_REPACKED, RUN_TOGETHER, ReadBytes
from benchmarks.packed_export import write_packed
from benchmarks.packed_tensors import Mix, packed_tensors
from benchmarks.plain_export import write_plain
from benchmarks.profile_step import main as profile
from benchmarks.shapes import MixtralShape, Qwen3MoeShape, Shape, model_bytes
from benchmarks.subjects import PACKED, Subject, model_subject
from benchmarks.synthetic import bf16_words, write_synthetic
from engine.models.architectures.gguf_architectures import architecture_of, config_of
from engine.models.architectures.gguf_tensors import entries_of
from engine.models.folders.prepare import prepare
from engine.models.formats.gguf_file import GgufFile

TINY = MixtralShape(layers=2, hidden=256, ffn=320, experts=4, heads=2, key_value_heads=1, vocabulary=500)
TINY_QWEN3 = Qwen3MoeShape(
    layers=2, hidden=128, ffn=64, experts=16, experts_per_token=4, heads=4, key_value_heads=2, head_width=32,
    vocabulary=600,
)  # fmt: skip


@pytest.mark.parametrize("shape", [TINY, TINY_QWEN3])
def test_the_synthetic_model_is_as_large_as_it_says(shape: Shape, tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "model", shape)
    file = folder / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size - 8 - header == model_bytes(shape)
    written = file.stat().st_mtime_ns
    write_synthetic(folder, shape)
    assert file.stat().st_mtime_ns == written


def test_the_default_shapes_are_those_of_the_models_they_are_named_after() -> None:
    assert model_bytes(MixtralShape(layers=32)) / 2 == pytest.approx(46.7e9, rel=1e-3)
    assert model_bytes(Qwen3MoeShape(layers=48, vocabulary=151936)) / 2 == pytest.approx(30.5e9, rel=2e-3)


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


def test_qwen3_moe_keeps_its_halves_and_norms_every_head(tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "model", TINY_QWEN3)
    reader = gguf.GGUFReader(write_gguf(folder, tmp_path / "model.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(folder / "model.safetensors", framework="pt") as source:
        query = source.get_tensor("model.layers.1.self_attn.q_proj.weight").view(torch.uint16).numpy()
        norm = source.get_tensor("model.layers.0.self_attn.k_norm.weight").float().numpy()
        up = source.get_tensor("model.layers.0.mlp.experts.5.up_proj.weight").view(torch.uint16).numpy()
    assert np.array_equal(tensors["blk.1.attn_q.weight"].data.view(np.uint16), query)
    assert np.array_equal(tensors["blk.0.attn_k_norm.weight"].data, norm)
    assert np.array_equal(tensors["blk.0.ffn_up_exps.weight"].data.view(np.uint16)[5], up)
    assert len(tensors) == 3 + 12 * TINY_QWEN3.layers
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3moe"
    assert fields["qwen3moe.attention.key_length"] == TINY_QWEN3.head_width
    assert fields["qwen3moe.expert_feed_forward_length"] == TINY_QWEN3.ffn


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_topk_prob": False}, "not normalised"),
        ({"mlp_only_layers": [0]}, "without experts"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_what_the_export_does_not_write_is_refused(change: dict[str, object], words: str, tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "model", TINY_QWEN3)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        write_gguf(folder, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


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
    with pytest.raises(ValueError, match="is olmoe, not mixtral or qwen3_moe"):
        write_gguf(folder, tmp_path / "model.gguf")


def test_formats_are_mapped_once_and_copies_counted(tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "model", TINY)
    subject = Subject("tiny", folder, tmp_path / "model.gguf")
    size, process = subject.nbytes, 1 << 30
    assert memory_needed(subject, ["privatellm", "privatellm-torch"]) == size + 2 * process
    assert memory_needed(subject, ["privatellm", "llama.cpp"]) == 2 * size + 2 * process
    assert memory_needed(subject, ["privatellm", "transformers", "llama.cpp"]) == 3 * size + 3 * process
    prepared = Subject("tiny", folder, tmp_path / "model.gguf", prepared=tmp_path)
    assert memory_needed(prepared, ["privatellm", "transformers", "llama.cpp"]) == 4 * size + 3 * process


@pytest.mark.slow
def test_all_engines_are_found_equal_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = ["privatellm", "privatellm-torch", "transformers"]
    if importlib.util.find_spec("llama_cpp") is not None:
        engines.append("llama.cpp")
    result = tmp_path / "result.json"
    small = ["--models", "synthetic", "--hidden", "256", "--ffn", "320", "--layers", "1", "--work", str(tmp_path)]
    measures = ["--measures", "decode", "4 rows", "2 answers", "prefill 64"]
    arguments = [*small, *measures, "--rounds", "2", "--steps", "2", "--threads", "1", "--engines", *engines]
    assert main([*arguments, "--json", str(result), "--markdown"]) == 0
    (model,) = json.loads(result.read_text(encoding="utf-8"))["models"]
    variants = {comparison["variant"] for comparison in model["comparisons"]}
    assert variants >= {"privatellm", "privatellm-torch", "transformers", "transformers-eager"}
    assert list(model["routing"]) == list(model["step_bytes"]) == ["decode", "4 rows", "2 answers"]
    assert model["routing"]["decode"]["distinct"] == 2
    assert all(comparison["cosine"] > 0.998 for comparison in model["comparisons"])
    assert set(model["seconds"]) == variants
    assert set(model["seconds"]["privatellm"]) == {"decode", "4 rows", "2 answers", "prefill 64"}
    assert set(model["seconds"]["transformers"]) == {"decode", "4 rows", "prefill 64"}
    assert all(len(values) == 2 for measured in model["seconds"].values() for values in measured.values())
    printed = capsys.readouterr().out
    assert "| 4 rows |" in printed
    assert "| Mixtral-shaped | decode: time relative to llama.cpp | ≤ 0.95 |" in printed


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q8_0", "MXFP4"])
def test_a_packed_file_opens_and_holds_what_is_read(tmp_path: Path, mix: Mix) -> None:
    shape = Qwen3MoeShape(
        2, 256, 256, experts=8, experts_per_token=2, heads=4, key_value_heads=2, head_width=64, vocabulary=600
    )
    path = write_packed(tmp_path / "model.gguf", shape.config(), mix, shape.embedding_scale)
    with GgufFile(path) as opened:
        config = config_of(opened)
        tensors = list(packed_tensors(shape.config(), mix))
        assert {tensor.name: tensor.format for tensor in tensors} == {
            name: tensor.format for name, tensor in opened.tensors.items()
        }
        reads = ReadBytes.packed(tensors, shape.config())
        entries = entries_of(opened, architecture_of(opened), config)[path.name]
        experts = sum(entry.nbytes for name, entry in entries.items() if "_exps" in name)
        assert reads.expert == experts // 8 // 2
        assert reads.head == entries["lm_head.weight"].nbytes


def test_a_process_s_first_answer_is_measured_in_every_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = Qwen3MoeShape(
        2, 256, 256, experts=8, experts_per_token=2, heads=4, key_value_heads=2, head_width=64, vocabulary=600
    )
    monkeypatch.setitem(PACKED, "qwen3-q4", ("qwen3-q4", shape, "Q4_K_M"))
    json_file = tmp_path / "found.json"
    options = ["--models", "qwen3-q4", "--engines", "privatellm", "--rounds", "1", "--prompt", "8", "--tokens", "2"]
    monkeypatch.setattr("sys.argv", ["first_touch", *options, "--work", str(tmp_path), "--json", str(json_file)])
    first_touch()
    (found,) = json.loads(json_file.read_text())["qwen3-q4"]["privatellm"]
    assert all(found[state]["prompt"] > 0 and found[state]["tokens"] > 0 for state in STATES)
    assert found["warmed"]["populating"] > 0
    assert found["warm"]["answered"] > found["warm"]["loaded"] > 0
    assert "| privatellm | steady | – | – |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_every_engine_computes_the_same_for_qwen3_moe(tmp_path: Path, apart: bool) -> None:
    installed = {"llama.cpp": "llama_cpp", "llama.cpp, in place": "llama_cpp", "mlx-lm": "mlx_lm"}
    installed |= {IK: "ik_llama_cpp", IK_REPACKED: "ik_llama_cpp"}
    engines = [
        kind
        for kind in KINDS
        if importlib.util.find_spec(installed.get(kind, "engine")) is not None
        and (not apart or RUN_TOGETHER & set(KINDS[kind].variants))
    ]
    folder = write_synthetic(tmp_path / "model", TINY_QWEN3)
    subject = Subject("tiny", folder, write_gguf(folder, tmp_path / "model.gguf"))
    with Bench(subject, engines, 1, tmp_path / "log") as bench:
        comparisons = check_equal(bench, apart, TINY_QWEN3.vocabulary)
    assert len(comparisons) >= len(engines) + (not apart)
    assert [comparison.variant for comparison in comparisons if not comparison.equal] == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["privatellm", "privatellm-torch"])
def test_a_profile_has_every_part(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--models", "synthetic", "--hidden", "256", "--ffn", "320", "--layers", "1", "--work", str(tmp_path)]
    result = tmp_path / "result.json"
    passes = ["--rows", "1", "3", "--prompts", "20", "--steps", "4", "--threads", "1"]
    assert profile([*small, *passes, "--engine", engine, "--json", str(result)]) == 0
    (model,) = json.loads(result.read_text(encoding="utf-8"))["models"]
    assert [(measured["rows"], measured["tokens"]) for measured in model["passes"]] == [(1, 0), (3, 0), (0, 20)]
    first = model["passes"][0]["passes"][0]
    assert first["distinct"] == 2 and first["routes"] == 2
    assert all(first["parts"][part] > 0 for part in ("attention", "router", "experts", "outside"))
    printed = capsys.readouterr().out
    assert printed.count("| whole |") == 3 and "**a prompt of 20 tokens**" in printed


@pytest.mark.slow
def test_the_cost_of_looking_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--models", "synthetic", "--hidden", "256", "--ffn", "320", "--layers", "1", "--work", str(tmp_path)]
    result = tmp_path / "result.json"
    assert look([*small, "--blocks", "2", "--threads", "1", "--json", str(result)]) == 0
    (model,) = json.loads(result.read_text(encoding="utf-8"))["models"]
    assert len(model["off"]) == len(model["on"]) == 2
    assert "| Synthetic Mixtral-shaped, 1 layer |" in capsys.readouterr().out
