"""What must not end a process, hang it or make it compute nonsense silently: damaged numbers, forks, bus errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.runtimes.protocol import Interrupted, LoadedModel
from tests.engine.cluster.memory_exchange import must_succeed, on_all_ranks
from tests.engine.cluster.ring_places import placement_for, places
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import NATIVE
from tests.engine.runtimes.torch_oracle import prompt
from tests.support.tiny_models import write_tiny_model

pytestmark = needs_kernels


def two_nodes(folder: Path) -> list[LoadedModel]:
    return [NATIVE.load(folder, place, cpu_threads=2) for place in places(placement_for(folder, 2, "overlapping"))]


@pytest.mark.parametrize("where", ["model.layers.0.mlp.gate.weight", "model.layers.1.input_layernorm.weight"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_come_out_as_such(where: str, bad: float, tmp_path: Path) -> None:
    """Every expert's logit NaN: some expert is run, nothing is read beside the weights, and nobody is told a lie."""
    folder = write_tiny_model(tmp_path / "model", "olmoe")
    tensors = load_file(folder / "model.safetensors")
    tensors[where] = np.full_like(tensors[where], bad)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    one = load_native(folder)
    for length in (3, 40):
        rows = one.start()
        assert not np.isfinite(rows.extend(prompt(one, length))).all()
        assert not np.isfinite(rows.step([5])).all()
    models = two_nodes(folder)

    def work(rank: int) -> bool:
        return bool(np.isfinite(models[rank].start().extend(prompt(models[rank], 40))).all())

    assert must_succeed(on_all_ranks(work, 2)) == [False, False]


@pytest.mark.parametrize("count", [8, 64])
def test_all_experts_for_every_token(count: int, tmp_path: Path) -> None:
    options = {"num_local_experts": count, "num_experts_per_tok": count}
    folder = write_tiny_model(tmp_path / "model", "mixtral", **options)
    one, models = load_native(folder), two_nodes(folder)
    tokens = prompt(one, 600)
    expected = one.start().extend(tokens)
    assert np.isfinite(expected).all()
    for found in must_succeed(on_all_ranks(lambda rank: models[rank].start().extend(tokens), 2)):
        assert (found == expected).all()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_computes_the_same(tmp_path: Path) -> None:
    """The pool's threads do not exist there; the pass runs on one."""
    model = load_native(write_tiny_model(tmp_path / "model", "qwen2_moe", max_position_embeddings=2048), cpu_threads=3)
    rows = model.start()
    rows.extend(prompt(model, 700))
    expected = rows.step([7])
    rows.truncate(700)
    out, to = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(to, b"same" if (rows.step([7]) == expected).all() else b"else")
        finally:
            os._exit(0)
    os.close(to)
    with os.fdopen(out, "rb") as pipe:
        assert pipe.read() == b"same"
    os.waitpid(child, 0)
    assert (rows.step([7]) == expected).all(), "the parent's threads are as they were"


def test_a_pass_that_is_interrupted_between_pieces_takes_nothing_back_from_beams(tmp_path: Path) -> None:
    """What an abandoned pass wrote lies behind what beams see of the same page."""
    model = load_native(write_tiny_model(tmp_path / "model", "mixtral", max_position_embeddings=2048))
    tokens = prompt(model, 33)
    single = model.start()
    single.extend(tokens)
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) > model.facts.layers + 1:
            raise Interrupted

    model.between_layers = check
    with pytest.raises(Interrupted):
        single.extend([9] * 700)
    model.between_layers = None
    beams = single.fan_out(3)
    single.extend([4] * 20)
    parents = [2, 0, 0]
    first = beams.step([5, 6, 7])
    beams.reorder(parents)
    second = beams.step([8, 8, 8])
    fresh = model.start()
    fresh.extend([*tokens])
    for row, token in enumerate((5, 6, 7)):
        fresh.truncate(len(tokens))
        assert np.abs(fresh.step([token])[0] - first[row]).max() < 1e-4
        expected = fresh.step([8])[0]
        for child in (child for child, parent in enumerate(parents) if parent == row):
            assert np.abs(expected - second[child]).max() < 1e-4


_GUARDED = """
import ctypes, mmap, os, signal, sys, tempfile
from engine.moe.kernels.bindings import load
heard = []
if sys.argv[1] == "heard":
    signal.signal(signal.SIGBUS, lambda *_: heard.append(1))
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGBUS, signal.SIG_IGN)
native = load()
native.pllm_guard_faults.restype = ctypes.c_int64

def lose_a_page():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8192))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        view = (ctypes.c_char * 8192).from_buffer(mapped)
        place = native.pllm_guard_add(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(8192))
        file.truncate(0)
        assert mapped[5000] == 0
        assert native.pllm_guard_faults(place) == 1
        native.pllm_guard_remove(place)

lose_a_page()
os.kill(os.getpid(), signal.SIGBUS)
lose_a_page()
print(len(heard))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal's sender is told apart as Linux does")
@pytest.mark.parametrize(("before", "result"), [("heard", "1"), ("ignored", "0"), ("default", None)])
def test_a_bus_error_that_is_somebody_elses_goes_to_who_was_there_before(before: str, result: str | None) -> None:
    """And the guard stays: a page that is lost afterwards is noticed as before."""
    run = subprocess.run([sys.executable, "-c", _GUARDED, before], capture_output=True, text=True, check=False)
    if result is None:
        assert run.returncode == -signal.SIGBUS
    else:
        assert (run.returncode, run.stdout.strip()) == (0, result), run.stderr


_UNGUARDED = """
import faulthandler, mmap, sys, tempfile
from engine.moe.kernels.bindings import load
import ctypes
if sys.argv[1] == "faulthandler":
    faulthandler.enable()
native = load()
other = ctypes.create_string_buffer(8)
assert native.pllm_guard_add(other, ctypes.c_size_t(8)) >= 0
with tempfile.TemporaryFile() as file:
    file.write(bytes(4096))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    file.truncate(0)
    mapped[0]
"""


@pytest.mark.parametrize("before", ["faulthandler", "default"])
def test_a_page_that_nobody_guards_still_ends_the_process(before: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _UNGUARDED, before], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == -signal.SIGBUS
    assert ("Bus error" in run.stderr) == (before == "faulthandler")
