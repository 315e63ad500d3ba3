"""The host's side of copies: the right bytes of every expert, in few runs, from locked pages, and no second copy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from benchmarks.packed_blocks import unpacked
from engine.models.folders.prepare import prepare
from engine.models.store.gguf_folder import open_gguf
from engine.runtimes.torch.offload.devices import tensors_in
from engine.runtimes.torch.offload.host_memory import ALIGNMENT, HostExperts
from engine.runtimes.torch.offload.torch_tensors import stored_dtype, view
from tests.engine.runtimes.torch.offload import second_mapping
from tests.support.engine_forks import with_libraries
from tests.support.hooked_engine import hooked
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.tiny_families import TINY_MOE_FAMILIES
from tests.support.tiny_gguf import whole_blocks, write_tiny_gguf
from tests.support.tiny_gguf_metadata import Layout
from tests.support.tiny_models import write_tiny_model


def slot_of(host: HostExperts, layer: int, expert: int) -> torch.Tensor:
    slot = torch.zeros(host.slot_bytes, dtype=torch.uint8)
    for piece in host.pieces(layer, expert):
        slot[piece.offset : piece.offset + piece.tensor.nbytes] = piece.tensor
    return slot


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["plain", "shards", "prepared"])
@pytest.mark.parametrize("family", TINY_MOE_FAMILIES)
def test_a_slot_holds_what_the_file_holds(
    family: str, kind: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model(family, shards=kind == "shards")
    if kind == "prepared":
        prepare(folder, tmp_path / "prepared", quiet)
        folder = tmp_path / "prepared"
    experts = experts_of(folder)
    host = HostExperts(experts)
    one = experts.nbytes // (experts.count * len(experts.layers))
    assert one <= host.slot_bytes <= one + 8 * ALIGNMENT
    for layer in experts.layers:
        for expert in (0, experts.count - 1):
            stored = experts.expert(layer, expert)
            found = tensors_in(slot_of(host, layer, expert), host.layout(layer), stored_dtype(experts.dtype))
            for name in ("gate_up", "gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
                there, wanted = getattr(found, name), getattr(stored, name)
                assert (there is None) == (wanted is None)
                if wanted is not None:
                    assert torch.equal(there, view(wanted))
                    assert there.stride() == view(wanted).stride(), "the kernels see the same shape of memory"
    pieces = host.pieces(experts.layers[0], 0)
    biases = 0 if experts.expert(experts.layers[0], 0).down_bias is None else 3
    assert len(pieces) == 2 + biases if kind == "prepared" else len(pieces) <= 6


def test_a_slot_computes_in_another_dtype(tiny_model: Callable[..., Path]) -> None:
    experts = experts_of(tiny_model("mixtral", dtype="bfloat16"))
    host = HostExperts(experts)
    found = tensors_in(slot_of(host, 0, 3), host.layout(0), torch.float32)
    assert torch.equal(found.down, view(experts.expert(0, 3).down).float())


@pytest.mark.parametrize(("layout", "kind"), [("stacked", "Q6_K"), ("fused", "Q4_K"), ("separate", "MXFP4")])
def test_a_slot_of_packed_weights_is_unpacked_for_computing(
    layout: Layout, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    source = write_tiny_model(tmp_path / "source", "qwen3_moe", **whole_blocks("qwen3_moe"))
    packed = GGMLQuantizationType[kind]
    path = write_tiny_gguf(tmp_path / "m.gguf", source, "qwen3moe", quantised=packed, layout=layout)
    experts = experts_of(open_gguf(path, quiet))
    host = HostExperts(experts)
    for layer in experts.layers:
        stored = experts.expert(layer, 2)
        slot, place = slot_of(host, layer, 2), host.layout(layer)
        found = tensors_in(slot, place, torch.float32)
        assert (found.gate_up is not None) == (layout == "fused")
        for name in ("gate", "up", "down"):
            wanted = torch.from_numpy(unpacked(kind, getattr(stored, name).words))
            assert torch.equal(getattr(found, name), wanted)
            assert torch.equal(getattr(tensors_in(slot, place, torch.bfloat16), name), wanted.bfloat16())


def test_locked_pages_are_read_from(tiny_model: Callable[..., Path]) -> None:
    experts = experts_of(tiny_model("mixtral", shards=True))
    host = HostExperts(experts)
    before = [slot_of(host, layer, 2) for layer in experts.layers]
    locked: dict[int, int] = {}

    def register(address: int, nbytes: int) -> str | None:
        locked[address] = nbytes
        return None

    assert host.lock(register, locked.pop, quiet) == []
    assert host.locked_bytes == sum(locked.values()) >= experts.nbytes
    for layer, slot in zip(experts.layers, before, strict=True):
        assert torch.equal(slot_of(host, layer, 2), slot)
        for piece in host.pieces(layer, 2):
            start = piece.tensor.data_ptr()
            assert any(first <= start and start + piece.tensor.nbytes <= first + size for first, size in locked.items())
    host.close()
    assert locked == {}


def test_a_refusal_half_way_keeps_what_was_locked(tiny_model: Callable[..., Path]) -> None:
    host = HostExperts(experts_of(tiny_model("mixtral", shards=True)))
    answers = iter([None, "limit reached"])
    (line,) = host.lock(lambda address, nbytes: next(answers), lambda address: None, quiet)
    assert "limit reached" in line
    assert "copies to the GPU are slower" in line
    assert 0 < host.locked_bytes < sum(mapped.size for mapped in host.experts.mapped_files)
    assert slot_of(host, 0, 0).any()


def test_more_than_the_memory_is_not_locked(tiny_model: Callable[..., Path]) -> None:
    host = HostExperts(experts_of(tiny_model("mixtral")))

    def register(address: int, nbytes: int) -> str | None:
        raise AssertionError("must not be asked")

    (line,) = host.lock(register, lambda address: None, quiet, available=1000)
    assert "are not page-locked" in line


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_second_mapping_takes_no_memory(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral", hidden_size=192, intermediate_size=2048)
    process = with_libraries(hooked(second_mapping.measure, folder=str(folder)), os.environ)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    with process.stdout as output:
        grown, experts = map(int, output.read().split())
    assert process.wait() == 0
    assert experts > 100_000_000
    assert grown < experts / 10
