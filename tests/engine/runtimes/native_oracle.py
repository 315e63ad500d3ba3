"""What the tests of the native trunk share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.ipc.messages import Load
from engine.moe.kernels.bindings import choose
from engine.runtimes import runtime_named
from engine.runtimes.native.model import NativeModel
from engine.runtimes.protocol import Logits
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "gpt_oss",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe",
    "qwen3_next",
    "lfm2_moe",
    "gemma4_text",
    "gemma4_dense",
    "gemma4_e2b",
    "gemma4_unified_text",
    "gemma3_text",
    "ministral3",
    "phi3",
    "glm4",
    "ernie4_5",
    "minimax_m2",
    "dots1",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "ernie4_5_moe",
    "exaone_moe",
    "cohere",
    "cohere2",
    "llama4_text",
    "granite",
    "lfm2",
    "smollm3",
    "seed_oss",
    "olmo2",
    "olmo3",
    "exaone4",
    "granitemoehybrid",
    "granitemoehybrid_dense",
    "solar_open",
    "hy_v3",
    "flex_olmo",
    "granitemoeshared",
    "nemotron_h",
    "nemotron_h_dense",
    "nemotron_h_latents",
    "kimi_linear",
    "bailing_hybrid",
    "gemma2",
    "afmoe",
    "granite_swa",
    "granitemoe_swa",
    "laguna",
    "cohere2_moe",
    "mimo_v2_flash",
    "mistral4",
    "step3p5",
    "gemma3n_text",
    "qwen4_exp_text",
    "apertus",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
)
GGUF_FAMILIES = tuple(family for family in FAMILIES if family in ARCHITECTURES)
"""Those of them whose GGUF files run."""
PREPARED_ONLY = ("gpt_oss", "llama4_text")
"""Those of the families whose checkpoints are transposed, so that the kernels read the experts of a bank only."""

needs_kernels = pytest.mark.skipif(not choose("float32").native, reason=choose("float32").reason)


def after_alike_branches(model: NativeModel, tokens: list[int], answer: Sequence[int]) -> Logits:
    """The logits [vocabulary] after ``tokens`` and ``answer`` in eighteen branches, which are the same to the bit."""
    rows = model.start()
    rows.extend(tokens)
    branches = rows.fan_out(18)
    for token in answer:
        alike = branches.step([token] * 18)
    assert all(row.tobytes() == alike[0].tobytes() for row in alike)
    first: Logits = alike[0]
    return first


def load_native(folder: Path, **options: Any) -> NativeModel:
    """``folder`` loaded by the native runtime, with two threads unless ``options`` say otherwise."""
    request = Load(id=1, model=folder.name, **({"cpu_threads": 2} | options))
    loaded = runtime_named("native").load(folder, request, quiet)
    assert isinstance(loaded, NativeModel)
    return loaded
