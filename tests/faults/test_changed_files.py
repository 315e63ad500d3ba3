"""Expert files that change, or get shorter, while their model is open: a sentence, and no token computed from them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from app.engine_client import how_it_ended
from engine.bench.local_ring import LocalEngine
from engine.errors import ModelError
from engine.ipc.messages import Finished, Generate, Load, Loaded
from engine.models.folders.prepare import prepare
from engine.models.store.gguf_folder import open_gguf
from engine.moe.kernels import bindings
from tests.engine.runtimes.native_oracle import load_native
from tests.engine.runtimes.torch_oracle import load, prompt
from tests.faults import shortened_files
from tests.support.engine_forks import with_libraries
from tests.support.hooked_engine import hooked
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

TRUNK, EXPERTS = "model-00001-of-00004.safetensors", "model-0000[2-4]-of-00004.safetensors"
"""Files of the prepared model: the one of the trunk, and those of experts as a pattern."""
needs_library = pytest.mark.skipif(bindings.path() is None, reason="the native library was not built")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A model whose experts take many pages."""
    plain = write_tiny_model(tmp_path / "plain", "mixtral", intermediate_size=400, eos_token_id=None)
    prepare(plain, tmp_path / "prepared", lambda *_: None)
    return tmp_path / "prepared"


def expert_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))[1:]
    assert len(found) == 3
    return found


def overwrite(file: Path) -> None:
    """Other numbers in the same file of the same size."""
    with file.open("r+b") as opened:
        opened.seek(0)
        opened.write(os.urandom(4096))
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("kernels", ["", "off"])
def test_no_token_comes_from_a_changed_file(prepared: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bindings.VARIABLE, kernels)
    model = load(prepared)
    tokens = prompt(model, 20)
    rows = model.start()
    rows.extend(tokens)
    rows.step([5])
    overwrite(expert_files(prepared)[1])
    for ask in (lambda: rows.step([6]), lambda: rows.extend([6, 7]), model.start):
        with pytest.raises(ModelError, match=r"00003\S* was changed while the model was open; load the model again"):
            ask()
    assert rows.length == 21


@needs_library
@pytest.mark.parametrize("file", [TRUNK, "model-00003-of-00004.safetensors"])
def test_the_native_trunk_takes_no_token_from_a_changed_file(prepared: Path, file: str) -> None:
    model = load_native(prepared)
    rows = model.start()
    rows.extend(list(range(3, 20)))
    rows.step([5])
    overwrite(prepared / file)
    for ask in (lambda: rows.step([6]), lambda: rows.extend([6, 7]), model.start):
        with pytest.raises(ModelError, match="was changed while the model was open; load the model again"):
            ask()
    assert rows.length == 18


@needs_library
def test_the_native_trunk_watches_a_plain_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "plain", "llama")
    model = load_native(folder)
    rows = model.start()
    rows.extend([5, 6, 7])
    overwrite(next(folder.glob("*.safetensors")))
    with pytest.raises(ModelError, match="was changed while the model was open"):
        rows.step([8])


def test_a_change_during_a_pass_is_noticed_before_its_logits_are_used(prepared: Path) -> None:
    model = load(prepared)
    rows = model.start()
    layers: list[int] = []

    def change() -> None:
        layers.append(len(layers))
        if len(layers) == 2:
            overwrite(expert_files(prepared)[0])

    model.between_layers = change
    with pytest.raises(ModelError, match="was changed while the model was open"):
        rows.extend(prompt(model, 20))
    assert (len(layers), rows.length) == (3, 0)


def shorten(
    folder: Path,
    kernels: str = "",
    runtime: str = "torch",
    files: str = EXPERTS,
    guarded: bool = True,
    noticed: bool = True,
) -> tuple[int, list[str]]:
    """The exit status of a process whose files are shortened during a pass, and what it said."""
    options = {"folder": str(folder), "runtime": runtime, "files": files, "guarded": guarded, "noticed": noticed}
    return ended(hooked(shortened_files.run, **options), kernels)


def ended(program: list[str], kernels: str = "") -> tuple[int, list[str]]:
    """The exit status of a process that is given no input, and what it said."""
    process = with_libraries(program, {**os.environ, bindings.VARIABLE: kernels})
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    with process.stdout as output:
        said = output.read().decode().splitlines()
    return process.wait(120), said


@pytest.mark.sampled
@needs_library
@pytest.mark.parametrize("kernels", ["", "off"])
def test_files_shortened_during_a_pass_end_the_answer_and_not_the_engine(prepared: Path, kernels: str) -> None:
    status, (said, alive) = shorten(prepared, kernels)
    assert status == 0
    assert "was changed while the model was open; load the model again. 17" in said
    assert alive == "alive"


@needs_library
@pytest.mark.parametrize("files", [EXPERTS, TRUNK])
def test_the_native_trunk_survives_files_shortened_during_a_pass(prepared: Path, files: str) -> None:
    """Its own weights lie in a mapped file, too."""
    status, (said, alive) = shorten(prepared, runtime="native", files=files)
    assert status == 0
    assert "was changed while the model was open; load the model again. 17" in said
    assert alive == "alive"


@needs_library
@pytest.mark.parametrize("runtime", ["torch", "native"])
def test_pages_that_cannot_be_read_are_noticed_though_the_file_looks_the_same(prepared: Path, runtime: str) -> None:
    """As on a failing disk."""
    status, (said, alive) = shorten(prepared, runtime=runtime, noticed=False)
    assert status == 0
    assert said.startswith("disk A part of ") and "could not be read" in said and said.endswith("again. 17")
    assert alive == "alive"


@needs_library
@pytest.mark.parametrize(("runtime", "noticed"), [("torch", True), ("torch", False), ("native", False)])
def test_files_shortened_while_they_are_loaded_refuse_the_model(tmp_path: Path, runtime: str, noticed: bool) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    file = write_tiny_gguf(tmp_path / "m.gguf", source, "llama", quantised=GGMLQuantizationType.F16)
    folder = open_gguf(file, lambda *_: None, folder=tmp_path / "opened")
    status, (said, alive) = ended(
        hooked(shortened_files.run_loading, folder=str(folder), runtime=runtime, files="*.gguf", noticed=noticed)
    )
    assert status == 0
    assert ("m.gguf was changed while the model was open" if noticed else "m.gguf could not be read") in said
    assert alive == "alive"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell it by another signal")
def test_without_the_library_the_way_it_ends_says_what_happened(prepared: Path) -> None:
    status, _ = shorten(prepared, "off", guarded=False)
    assert status == -signal.SIGBUS
    sentence = how_it_ended(status)
    assert "SIGBUS" in sentence and "shortened while it was in use" in sentence


@needs_library
def test_other_bus_errors_still_end_the_process(tmp_path: Path, prepared: Path) -> None:
    code = """
import ctypes, mmap, os, sys
from pathlib import Path
from engine.models.formats.mapped_file import MappedFile
from engine.moe.kernels.file_guard import FileGuard
guarded, other = Path(sys.argv[1]), Path(sys.argv[2])
guard = FileGuard([MappedFile(guarded)])
other.write_bytes(bytes(8192))
mapped = MappedFile(other)
os.truncate(other, 0)
ctypes.string_at(mapped.address, 1)
"""
    arguments = [sys.executable, "-c", code, str(expert_files(prepared)[0]), str(tmp_path / "other")]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode in (-signal.SIGBUS, -signal.SIGSEGV)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", pytest.param("native", marks=needs_library)])
def test_the_person_is_told_and_goes_on(prepared: Path, tmp_path: Path, runtime: str) -> None:
    """Through the engine process: the answer fails with a sentence, and the model loads again once the file is back."""
    file = expert_files(prepared)[2]
    whole = file.read_bytes()
    load_it = {"model": str(prepared), "runtime": runtime}
    engine = LocalEngine(tmp_path / "home", launch=with_libraries)
    try:
        assert isinstance(engine.ask(Load(id=1, **load_it)), Loaded)
        first = engine.ask(Generate(id=2, prompt_ids=[5, 6, 7], max_tokens=6))
        assert isinstance(first, Finished)
        os.truncate(file, 100)
        with pytest.raises(
            ModelError, match=re.escape(f"{file} was changed while the model was open; load the model again.")
        ):
            engine.ask(Generate(id=3, prompt_ids=[5, 6, 7, 8], max_tokens=6))
        file.write_bytes(whole)
        assert isinstance(engine.ask(Load(id=4, **load_it)), Loaded)
        again = engine.ask(Generate(id=5, prompt_ids=[5, 6, 7], max_tokens=6))
        assert isinstance(again, Finished)
        assert again.token_ids == first.token_ids
    finally:
        engine.close()
