"""Safetensors models as vLLM's tools quantise them, in the native and the torch runtime: transformers' logits on what
the weights stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.ipc.messages import ExpertPolicy
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.engine.runtimes.subjects import ZERO_POINTS, prompt_of
from tests.engine.runtimes.test_runtimes_grouped_models import assert_like_the_library, loaded_by
from tests.engine.runtimes.torch_oracle import EXACT, assert_shared_on_a_device, library_run, load, our_run, worst

pytestmark = pytest.mark.usefixtures("home")

Grouped = Callable[[str, str], tuple[Path, Path]]

MODELS = [
    ("qwen3_moe", "NVFP4", "native"), ("llama", "NVFP4", "torch"), ("qwen3", "NVFP4-ModelOpt", "native"),
    ("mixtral", "NVFP4-ModelOpt", "torch"), ("phi3", "NVFP4", "native"),
    ("qwen3_moe", "AWQ", "native"), ("qwen3_moe", "AWQ", "torch"), ("mixtral", "GPTQ", "native"),
    ("qwen2_moe", "packed-zero-points", "torch"), ("llama", "GPTQ", "torch"), ("qwen3", "packed-4-bit", "native"),
    ("llama", "AWQ", "native"), ("qwen3_moe", "integers", "native"), ("mixtral", "packed-8-bit", "native"),
    ("deepseek_v3", "GPTQ-8-bit", "native"), ("qwen3", "integers", "torch"),
    ("qwen3_5_moe_text", "integers", "native"), ("qwen2_moe", "GPTQ-8-bit", "torch"),
    ("llama4_text", "packed-4-bit", "native"), ("llama4_text", "NVFP4", "torch"),
    ("gemma4_text", "NVFP4-ModelOpt", "native"), ("gemma4_text", "packed-8-bit", "torch"),
]  # fmt: skip


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(("family", "stored", "runtime"), MODELS)
def test_quantised_models_give_the_logits_of_what_they_stand_for(
    grouped: Grouped, monkeypatch: pytest.MonkeyPatch, family: str, stored: str, runtime: str
) -> None:
    monkeypatch.setattr("engine.models.folders.checkpoint._WORTH_SAYING", 1)
    folder, truth = grouped(family, stored)
    model = loaded_by(runtime, folder)
    assert (model.facts.dtype, model.facts.runtime) == ("bfloat16", runtime)
    assert_like_the_library(model, truth)
    nvfp4 = ZERO_POINTS[stored].in_nvfp4
    assert model.facts.weights == ("NVFP4" if nvfp4 else f"{ZERO_POINTS[stored].bits}-bit")
    predicted = sizes_of(open_model(folder)).for_runtime(runtime)
    assert predicted.trunk_bytes == pytest.approx(model.facts.trunk_bytes, rel=0.02)
    assert predicted.expert_bytes == model.facts.expert_bytes
    assert any("GB of" in line for line in model.facts.notices) == (not nvfp4)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "stored"),
    [("qwen3_moe", "AWQ"), ("llama", "GPTQ"), ("qwen3_moe", "NVFP4"), ("llama", "NVFP4-ModelOpt"),
     ("mixtral", "packed-4-bit"), ("qwen3", "packed-zero-points"),
     ("deepseek_v3", "integers"), ("qwen3_5_moe_text", "AWQ"),
     ("llama4_text", "packed-zero-points"), ("gemma4_text", "NVFP4")],
)  # fmt: skip
def test_unpacked_weights_give_the_librarys_logits(
    grouped: Grouped, monkeypatch: pytest.MonkeyPatch, family: str, stored: str
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder, truth = grouped(family, stored)
    model, tokens = load(folder, dtype="float32"), prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "stored", "policy"),
    [("qwen3_moe", "NVFP4", "balanced"), ("qwen3_moe", "AWQ", "balanced"), ("mixtral", "packed-4-bit", "lru-offload")],
)
def test_a_device_shares_repacked_experts(
    grouped: Grouped, monkeypatch: pytest.MonkeyPatch, family: str, stored: str, policy: ExpertPolicy
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    assert_shared_on_a_device(*grouped(family, stored), policy)
