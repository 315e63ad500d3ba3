"""Models whose matrices are stored in formats of their own, plain beside packed: in every runtime what their weights
stand for."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from benchmarks.packed_blocks import WRITTEN
from engine import runtimes
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import needs_preparing, prepare
from engine.models.store.gguf_folder import open_gguf
from engine.runtimes import choosing
from engine.runtimes.choosing import native_unsupported_reason
from engine.session.loading import load_session
from tests.engine.runtimes.native_oracle import GGUF_FAMILIES, load_native, needs_kernels
from tests.engine.runtimes.subjects import prompt_of
from tests.engine.runtimes.torch_oracle import library_run, load, our_run, typical, worst
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("home")


FORMATS = ("F32", "F16", "BF16", *WRITTEN)
EXACT, ROUNDED = 1e-5, 0.1
"""Largest errors as a share of the logits' spread: in float32, and where inputs are rounded to eight bits."""


def drawn(salt: int) -> Callable[[str], GGMLQuantizationType]:
    """A format for every matrix of a file, by its name; the experts of a layer have the same."""

    def kind(name: str) -> GGMLQuantizationType:
        alike = re.sub(r"\.\d+\.weight$", ".weight", name)
        return GGMLQuantizationType[FORMATS[zlib.crc32(f"{salt} {alike}".encode()) % len(FORMATS)]]

    return kind


def written(folder: Path, family: str, kinds: Callable[[str], GGMLQuantizationType]) -> tuple[Path, Path]:
    """The opened folder of a GGUF file with matrices of ``kinds``, and that of what they stand for."""
    source = write_tiny_model(folder / "source", family, **whole_blocks(family))
    window = {"attention.sliding_window": 16} if family == "mistral" else {}
    path = write_tiny_gguf(
        folder / "m.gguf", source, ARCHITECTURES[family], quantised=kinds, extra=window, truth=folder / "truth"
    )
    return open_gguf(path, quiet, folder=folder / "opened"), folder / "truth"


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("salt", range(3))
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_every_mix_of_formats_runs_on_native(tmp_path: Path, family: str, salt: int) -> None:
    folder, truth = written(tmp_path, family, drawn(salt))
    assert native_unsupported_reason(folder, Load(id=1, model="mixed", runtime="native")) is None
    model, tokens = load_native(folder), prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert typical(our_run(model, tokens, 2, answer), theirs) < ROUNDED


@needs_kernels
@pytest.mark.parametrize(
    "kinds",
    [
        {"ffn_gate": "Q5_0", "ffn_up": "Q4_0", "ffn_down": "F16"},
        {"attn_q": "F16", "attn_k": "Q8_0", "attn_v": "BF16"},
        {"attn_q": "Q6_K", "attn_k": "Q8_0", "attn_v": "F32", "attn_output": "F16"},
    ],
    ids=lambda kinds: "-".join(kinds.values()),
)
def test_a_dense_model_is_opened_on_native_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: dict[str, str]
) -> None:
    monkeypatch.setattr(choosing, "on_apple_silicon", lambda: False)
    monkeypatch.setattr(runtimes, "gpu_present", lambda: False)

    def kind(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType[kinds.get(name.split(".")[-2], "Q4_0")]

    folder, truth = written(tmp_path, "llama", kind)
    session = load_session(Load(id=1, model=str(folder)), quiet)
    assert (session.facts.runtime, session.facts.notices) == ("native", [])
    model, tokens = load_native(folder), prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert typical(our_run(model, tokens, 2, answer), theirs) < ROUNDED
    model = load(folder, dtype="float32")
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_plain_experts_have_a_type_for_each_layer(tmp_path: Path, runtime: str) -> None:
    folder = write_tiny_model(tmp_path / "model", "mixtral")
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if ".layers.1." in name and ".experts." in name:
            tensors[name] = values.astype(np.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    answer, theirs = library_run(folder, tokens := prompt_of(40), chunks=1, dtype="float32")
    model = (load_native if runtime == "native" else load)(folder, dtype="float32")
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT
    experts = open_model(folder).experts
    assert experts is not None and len({experts.expert(layer, 0).gate.dtype for layer in experts.layers}) == 2


def test_experts_in_several_formats_have_no_prepared_copy(tmp_path: Path) -> None:
    """It would hold the words of one as those of the other."""
    folder = write_tiny_model(tmp_path / "model", "mixtral")
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if ".layers.1." in name and ".experts." in name:
            tensors[name] = values.astype(np.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    worth_it, why = needs_preparing(folder)
    assert not worth_it and "several number formats" in why
    with pytest.raises(ModelError, match=r"several number formats \(F16, F32\).*use it as it is"):
        prepare(folder, tmp_path / "bank", quiet)
