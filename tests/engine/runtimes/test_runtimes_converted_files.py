"""GGUF files that llama.cpp's own converter and quantiser wrote: transformers' logits on what their weights stand for,
in native and in torch. ``tests/engine/runtimes/converted/write.py`` says how they were made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.number_formats import is_packed
from engine.models.store.gguf_folder import open_gguf
from engine.models.text.tokenizer import load_tokenizer
from engine.runtimes.choosing import native_unsupported_reason
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.torch_oracle import load, our_run, typical, worst
from tests.support.progress import quiet

pytestmark = pytest.mark.usefixtures("home")


WRITTEN = Path(__file__).with_name("converted")
FILES = sorted(path.stem for path in WRITTEN.glob("*.gguf"))
EXACT, ROUNDED = 1e-5, 0.07
"""Largest errors as a share of the logits' spread: in float32, and where inputs are rounded to eight bits."""


def expected(name: str) -> tuple[list[int], list[int], list[Any]]:
    """The prompt, the answer, and the logits of each of its steps."""
    found = np.load(WRITTEN / f"{name}.npz")
    return found["prompt"].tolist(), found["answer"].tolist(), list(found["logits"])


def test_there_are_files_of_several_architectures_plain_and_packed() -> None:
    architectures, formats = set(), set()
    for name in FILES:
        with GgufFile(WRITTEN / f"{name}.gguf") as gguf:
            architectures.add(gguf.metadata["general.architecture"])
            formats.add(frozenset(tensor.format for tensor in gguf.tensors.values()))
    assert architectures >= {"llama", "qwen2moe", "qwen3next", "qwen35moe", "lfm2moe", "gemma4"}
    assert {"F32", "BF16"} in formats and {"F32", "F16"} in formats
    assert any("F16" in several and any(map(is_packed, several)) for several in formats)


@needs_kernels
@pytest.mark.parametrize("name", FILES)
def test_native_gives_the_librarys_logits(name: str) -> None:
    folder = open_gguf(WRITTEN / f"{name}.gguf", quiet)
    assert native_unsupported_reason(folder, Load(id=1, model=name)) is None
    prompt, answer, logits = expected(name)
    model = load_native(folder, dtype="float32")
    packed = any(is_packed(tensor.dtype) for _, tensor in open_model(folder).trunk())
    ours = our_run(model, prompt, 2, answer)
    assert (typical(ours, logits) < ROUNDED) if packed else (worst(ours, logits) < EXACT)


@pytest.mark.parametrize("name", FILES)
def test_torch_gives_the_librarys_logits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder = open_gguf(WRITTEN / f"{name}.gguf", quiet)
    prompt, answer, logits = expected(name)
    assert worst(our_run(load(folder, dtype="float32"), prompt, 2, answer), logits) < EXACT


@pytest.mark.parametrize("name", FILES)
def test_their_tokenizers_are_read(name: str) -> None:
    tokenizer = load_tokenizer(open_gguf(WRITTEN / f"{name}.gguf", quiet))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("bade cafe!")).strip() == "bade cafe!"


@pytest.mark.soak
def test_llama_cpp_writes_the_same_files_again(tmp_path: Path) -> None:
    """Where llama.cpp's sources are, as LLAMA_CPP_SOURCES says, and llama-cpp-python is installed."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is installed by `make bench`")
    sources = os.environ.get("LLAMA_CPP_SOURCES")
    if not sources:
        pytest.skip("LLAMA_CPP_SOURCES does not name llama.cpp's sources")
    subprocess.run(
        [sys.executable, "-m", "tests.engine.runtimes.converted.write", sources, "--to", tmp_path],
        check=True,
        cwd=WRITTEN.parents[3],
    )
    for name in FILES:
        with GgufFile(tmp_path / f"{name}.gguf") as ours, GgufFile(WRITTEN / f"{name}.gguf") as kept:
            assert {tensor: found.format for tensor, found in ours.tensors.items()} == {
                tensor: found.format for tensor, found in kept.tensors.items()
            }
            for tensor in kept.tensors:
                assert np.array_equal(ours.floats(tensor), kept.floats(tensor)), tensor
        one, other = (dict(np.load(folder / f"{name}.npz")) for folder in (tmp_path, WRITTEN))
        assert worst(list(one["logits"]), list(other["logits"])) < EXACT
