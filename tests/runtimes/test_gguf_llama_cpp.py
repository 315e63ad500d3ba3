"""The same GGUF file in llama.cpp: privatellm is as near to what the weights stand for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from native_oracle import FAMILIES as NATIVE
from native_oracle import load_native, needs_kernels
from subjects import prompt_of
from tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tiny_models import write_tiny_model
from torch_oracle import library_run, load, no_progress, our_run, typical

from engine.models.gguf_folder import open_gguf

pytest.importorskip("llama_cpp", reason="llama-cpp-python is installed by `make bench`")
pytestmark = [needs_kernels, pytest.mark.soak]

ALIKE = 1.1
"""Largest error of ours as a multiple of llama.cpp's, the mean over the families."""
PLAIN = 0.002
"""Error of llama.cpp on plain weights, which computes with keys and values in float16."""
FAMILIES = tuple(family for family in ARCHITECTURES if family != "mistral")
"""Families of which llama.cpp computes the same: it takes a mistral file for a llama without a window."""


ALIKE_FOR: dict[str, dict[str, Any]] = {
    "olmoe": {"clip_qkv": None},
    "deepseek_v2": {"q_lora_rank": 256, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
}
"""What llama.cpp does otherwise is left out: it knows no limit of olmoe's queries and keys, which no published model
has, rounds the borders of yarn, which gpt-oss leaves as they are, chooses groups of experts by their best two where
DeepSeek V2 does it by the best, and takes queries without latents for V2-Lite, of 27 layers."""


def errors(tmp_path: Path, family: str, kind: str) -> tuple[float, float]:
    """Our error and llama.cpp's, relative to transformers' logits on what the weights stand for."""
    from benchmarks.engines import LlamaCppInPlaceEngine

    source = write_tiny_model(
        tmp_path / f"{family}-source", family, **(whole_blocks(family) | ALIKE_FOR.get(family, {}))
    )
    truth = tmp_path / f"{family}-truth"
    quantised = GGMLQuantizationType[kind]
    path = tmp_path / f"{family}-{kind}.gguf"
    write_tiny_gguf(path, source, ARCHITECTURES[family], quantised=quantised, truth=truth)
    tokens = prompt_of(24)
    answer, wanted = library_run(truth, tokens, chunks=1)
    loaded = load_native if family in NATIVE else load
    ours = our_run(loaded(open_gguf(path, no_progress), dtype="float32"), tokens, 1, answer)
    engine = LlamaCppInPlaceEngine(path, 2)
    theirs = [engine.prompt(tokens)]
    engine.rows(1)
    theirs += [engine.step([token])[0] for token in answer[:-1]]
    return typical(ours, wanted), typical(theirs, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_reads_the_file_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    ours, theirs = errors(tmp_path, family, "F32")
    assert ours < 1e-5
    assert theirs < PLAIN


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_packed_weights_cost_no_more_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    ratios = [ours / theirs for ours, theirs in (errors(tmp_path, family, kind) for family in FAMILIES)]
    assert math.prod(ratios) ** (1 / len(ratios)) < ALIKE
