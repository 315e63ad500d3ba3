"""GGUF files in the torch runtime: transformers' logits on what the packed weights stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from native_oracle import needs_kernels
from pairwise import in_turn
from subjects import prompt_of
from tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tiny_models import write_tiny_model
from torch_oracle import library_model, library_run, load, no_progress, our_run, typical, worst

from benchmarks.packed_blocks import random_blocks
from benchmarks.stand_in_device import StandInDevice
from engine.errors import ModelError
from engine.ipc.messages import ExpertPolicy, Load
from engine.models.files import ModelFiles, StoredTensor
from engine.models.gguf_folder import open_gguf
from engine.models.number_formats import BLOCKS, is_packed
from engine.models.opening import open_model
from engine.models.sizes import sizes_of
from engine.moe.kernels.bindings import choose
from engine.planning.hybrid import GPU_RUNTIME_BYTES
from engine.runtimes.torch.packed_modules import PackedLinear
from engine.runtimes.torch.runtime import TorchRuntime

EXACT = 1e-5
"""Both compute in float32; the order of the sums differs."""
ROUNDED = 0.05
"""Largest usual error where the native kernels round the experts' inputs to eight bits, as a share of the logits'
spread: these models, of random weights, make small errors larger than real ones do."""
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe_lite", "gemma4_text")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny model of a family, written once."""
    folder = tmp_path_factory.mktemp("sources")
    return functools.cache(lambda family: write_tiny_model(folder / family, family, **whole_blocks(family)))


def packed_model(folder: Path, source: Path, family: str, kind: str) -> tuple[Path, Path]:
    """The model folder of ``source`` packed as ``kind``, and the folder of what its weights stand for."""
    path = write_tiny_gguf(
        folder / "m.gguf",
        source,
        ARCHITECTURES[family],
        quantised=GGMLQuantizationType[kind],
        extra={"attention.sliding_window": 16} if family == "mistral" else {},
        merged=kind in ("Q8_0", "Q6_K"),
        truth=folder / "truth",
    )
    return open_gguf(path, no_progress), folder / "truth"


def mostly(files: ModelFiles) -> str:
    """The format of most of the experts, or of the embedding."""
    if files.experts is not None:
        return files.experts.dtype
    return dict(files.trunk())["model.embed_tokens.weight"].dtype


@pytest.mark.parametrize(("family", "kind"), in_turn(tuple(ARCHITECTURES), tuple(BLOCKS)))
def test_unpacked_weights_give_the_librarys_logits(
    tmp_path: Path, sources: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder, truth = packed_model(tmp_path, sources(family), family, kind)
    assert mostly(open_model(folder)) == kind
    model, tokens = load(folder, dtype="float32"), prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT
    if model.facts.experts:
        assert any(f"stored as {kind} and unpacked" in line for line in model.facts.notices)


@needs_kernels
@pytest.mark.parametrize(("family", "kind"), [("mixtral", "Q4_K"), ("qwen2_moe", "MXFP4"), ("llama", "Q6_K")])
def test_packed_experts_run_in_the_native_kernels(
    tmp_path: Path, sources: Callable[[str], Path], family: str, kind: str
) -> None:
    folder, truth = packed_model(tmp_path, sources(family), family, kind)
    model, tokens = load(folder), prompt_of(40)
    assert model.facts.dtype == "bfloat16"
    assert ("native" in model.facts.executor) == (family != "llama")
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert typical(our_run(model, tokens, 2, answer), theirs) < ROUNDED


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q4_K"),
        ("qwen2", "Q5_0"),
        ("qwen3_5_text", "Q6_K"),
        ("qwen3_5_moe_text", "Q4_K"),
        ("deepseek_v2", "Q8_0"),
        ("glm4_moe_lite", "Q4_K"),
        ("glm4_moe", "Q4_K"),
        ("qwen3_next", "Q5_K"),
        ("lfm2_moe", "Q4_K"),
        ("gemma4_text", "Q4_K"),
    ],
)
def test_a_packed_trunk_stays_where_it_lies(
    tmp_path: Path, sources: Callable[[str], Path], family: str, kind: str
) -> None:
    folder, truth = packed_model(tmp_path, sources(family), family, kind)
    model, tokens = load(folder), prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert typical(our_run(model, tokens, 2, answer), theirs) < ROUNDED
    stored = open_model(folder)
    assert model.facts.trunk_bytes == pytest.approx(sizes_of(stored).for_runtime("torch").trunk_bytes, rel=0.01)
    kept = sum(tensor.nbytes for _, tensor in stored.trunk() if is_packed(tensor.dtype) and len(tensor.shape) == 2)
    assert model.facts.trunk_bytes >= kept > stored.trunk_bytes / 2
    library = library_model(truth)
    assert model.facts.parameters == sum(parameter.numel() for parameter in library.parameters())


@needs_kernels
def test_memory_that_runs_out_in_a_product_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose("bfloat16")
    layer = PackedLinear(StoredTensor("Q8_0", random_blocks("Q8_0", 4, 32)), None, None, choice)
    monkeypatch.setattr(layer, "_native", SimpleNamespace(pllm_linear=lambda *arguments: -2))
    with pytest.raises(ModelError, match="could not be multiplied: out of memory") as refused:
        layer(torch.ones(1, 32, dtype=torch.bfloat16))
    assert refused.value.kind == "memory"


@needs_kernels
def test_a_packed_trunk_whose_file_changes_is_not_believed(tmp_path: Path, sources: Callable[[str], Path]) -> None:
    folder, _ = packed_model(tmp_path, sources("llama"), "llama", "Q4_K")
    model = load(folder)
    rows = model.start()
    rows.extend(prompt_of(5))
    file = tmp_path / "m.gguf"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"m\.gguf was changed while the model was open"):
        rows.step([7])
    with pytest.raises(ModelError, match=r"m\.gguf was changed"):
        model.start()


@pytest.mark.parametrize(
    ("kind", "family", "policy"),
    in_turn(tuple(BLOCKS), MOE, ("balanced", "lru-offload", "stream", "layers", "twiddler", "monde")),
)
def test_a_device_shares_packed_experts(
    tmp_path: Path,
    sources: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kind: str,
    policy: ExpertPolicy,
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder, truth = packed_model(tmp_path, sources(family), family, kind)
    experts = open_model(folder).experts
    assert experts is not None
    device = StandInDevice(2 * GPU_RUNTIME_BYTES)
    room = 3 * experts.place(experts.layers[0], 0).nbytes + 1000
    request = Load(id=1, model="packed", cpu_threads=1, dtype="float32", policy=policy, gpu_expert_bytes=room)
    model = TorchRuntime(lambda: device).load(folder, request, no_progress)
    copied = {op.nbytes for op in device.trace if op.kind in ("copy", "fill")}
    tokens = prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT
    copied |= {op.nbytes for op in device.trace if op.kind in ("copy", "fill")}
    assert copied <= {experts.place(layer, 0).nbytes for layer in experts.layers}, "packed bytes travel, nothing else"
    assert copied or policy in ("layers", "twiddler")
    assert model.facts.expert_bytes == experts.nbytes
    model.close()
    assert np.isfinite(theirs[0]).all()
