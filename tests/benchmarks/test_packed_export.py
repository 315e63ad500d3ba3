"""Packed files of random models: what is in them, and that privatellm and llama.cpp compute the same from them."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.engines import LlamaCppEngine, PrivatellmEngine
from benchmarks.measuring import ReadBytes, compare_logits
from benchmarks.packed_export import write_packed
from benchmarks.packed_metadata import describe, rotary_divisors
from benchmarks.packed_shapes import (
    Gemma4Shape,
    GlmAirShape,
    GlmFlashShape,
    Lfm2MoeShape,
    PackedShape,
    Qwen3NextShape,
)
from benchmarks.packed_tensors import PACKED_FAMILIES, packed_tensors
from benchmarks.subjects import PACKED, Subject, packed_folder
from benchmarks.worker import logits, random_tokens
from engine.models.architectures.families import stated_experts_per_token
from engine.models.architectures.gguf_architectures import architecture_of, config_of
from engine.models.architectures.gguf_tensors import entries_of
from engine.models.formats.gguf_file import GgufFile

needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")

# As many experts as are used: else rounding decides in each engine for itself which expert is the last one.
TINY: dict[str, PackedShape] = {
    "glm47-q4": GlmFlashShape(
        3, 256, 512, 256, experts=4, experts_per_token=4, heads=2, query_rank=256, latents=256, plain=64, rotated=32,
        values=128, vocabulary=600,
    ),
    "next-q4": Qwen3NextShape(
        4, 256, 256, experts=4, experts_per_token=4, heads=4, key_value_heads=2, head_width=64, linear_key_heads=2,
        linear_value_heads=4, linear_width=64, vocabulary=600,
    ),
    "gemma4-q4": Gemma4Shape(
        6, 256, 288, 160, experts=4, experts_per_token=4, heads=4, key_value_heads=2, head_width=64,
        wide_key_value_heads=1, wide_head_width=128, window=16, vocabulary=600,
    ),
    "lfm2-q4": Lfm2MoeShape(
        4, 256, 512, 256, experts=4, experts_per_token=4, heads=4, key_value_heads=2, vocabulary=600
    ),
    "glm45-q4": GlmAirShape(
        3, 256, 288, 160, experts=4, experts_per_token=4, heads=4, key_value_heads=2, head_width=64, vocabulary=600
    ),
}  # fmt: skip
"""Small models of the shapes, by the names of the large ones."""


@pytest.mark.parametrize("name", TINY)
def test_a_file_opens_and_holds_what_is_read(name: str, tmp_path: Path) -> None:
    config = TINY[name].config()
    path = write_packed(tmp_path / "model.gguf", config, "Q4_K_M")
    with GgufFile(path) as opened:
        found = config_of(opened)
        entries = entries_of(opened, architecture_of(opened), found)[path.name]
        assert {key: found.get(key, value) for key, value in config.items()} == config
        # What is counted of a measured model comes from the configuration that its file stands for.
        tensors = list(packed_tensors(found, "Q4_K_M"))
        assert [(tensor.name, tensor.format, tensor.shape) for tensor in tensors] == [
            (each, tensor.format, tensor.shape) for each, tensor in opened.tensors.items()
        ]
    reads = ReadBytes.packed(tensors, found)
    experts = sum(entry.nbytes for each, entry in entries.items() if "_exps" in each)
    assert reads.experts == reads.per_token == stated_experts_per_token(config)
    assert reads.expert == pytest.approx(experts / reads.experts / reads.layers, rel=0.01)


@needs_llama_cpp
@pytest.mark.parametrize("name", TINY)
def test_both_engines_compute_the_same(name: str, tmp_path: Path) -> None:
    shape = TINY[name]
    path = write_packed(tmp_path / "model.gguf", shape.config(), "Q4_K_M", 0.5)
    subject = packed_folder(Subject(shape.title, tmp_path / "model", path, packed=True))
    tokens = random_tokens(7, 24, 600)
    ours, theirs = (
        np.array(logits(engine(subject.path_for(kind), 1), tokens, rows=2, steps=3, vocabulary=600))
        for kind, engine in (("privatellm", PrivatellmEngine), ("llama.cpp", LlamaCppEngine))
    )
    comparison = compare_logits("privatellm", ours, theirs, least_cosine=0.998, near_tie=0.02)
    assert comparison.equal, str(comparison)


@needs_llama_cpp
@pytest.mark.parametrize("name", TINY)
def test_types_are_those_of_llama_cpps_quantiser(name: str, tmp_path: Path) -> None:
    import llama_cpp

    config = PACKED[name][1].config()
    wide, packed = tmp_path / "wide.gguf", tmp_path / "packed.gguf"
    writer = gguf.GGUFWriter(wide, PACKED_FAMILIES[config["model_type"]].architecture)
    describe(writer, config)
    writer.add_tokenizer_model("no_vocab")
    tensors = list(packed_tensors(config, "Q4_K_M"))
    for tensor in tensors:
        # Types depend on names and on the length of rows, not on how many there are.
        few = [min(2, size) for size in tensor.shape[:-1]]
        writer.add_tensor(tensor.name, np.ones((*few, tensor.shape[-1]), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parameters: Any = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    assert llama_cpp.llama_model_quantize(bytes(wide), bytes(packed), ctypes.byref(parameters)) == 0
    chosen = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(packed).tensors}
    assert chosen == {tensor.name: tensor.format for tensor in tensors}


def test_the_shapes_are_those_of_the_models_they_are_named_after() -> None:
    whole = {
        GlmFlashShape(47, vocabulary=154880): 29.9e9,
        Qwen3NextShape(48, vocabulary=151936): 79.7e9,
        Gemma4Shape(30, vocabulary=262144): 25.2e9,
        Lfm2MoeShape(24, dense_layers=2, vocabulary=65536): 8.3e9,
        GlmAirShape(46, vocabulary=151552): 106e9,
    }
    for shape, parameters in whole.items():
        count = sum(int(np.prod(tensor.shape)) for tensor in packed_tensors(shape.config(), "Q8_0"))
        assert count == pytest.approx(parameters, rel=0.02), shape.title


def test_a_quarter_of_a_wide_head_is_rotated() -> None:
    divisors = rotary_divisors(replace(Gemma4Shape(), wide_head_width=16).config())
    assert divisors == [1.0] * 2 + [1e30] * 6
