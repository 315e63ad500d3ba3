"""Our kernels for NVIDIA GPUs, compiled for this processor: what they decode and multiply, and which experts they take.

Whole models run by them on a real GPU in test_cuda_device_models.py.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.packed_blocks import block_of, random_blocks
from engine.models.formats.number_formats import BLOCK_SIDE, BLOCKS, GROUPED, words_shape
from engine.moe.kernels import bindings
from engine.runtimes.torch.offload import cuda_experts
from engine.runtimes.torch.offload.cuda_experts import (
    SOURCE,
    CompilingFailed,
    CudaExperts,
    CudaLauncher,
    ExpertRows,
    Grid,
    part_of,
    parts_of,
)
from engine.runtimes.torch.offload.devices import SlotLayout, SlotMatrix, tensors_in
from engine.runtimes.torch.offload.gates import Activation
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.local_torch import run_expert
from tests.support.opened_experts import experts_of
from tests.support.pairwise import pairwise
from tests.support.shared_folders import shared_root, written_once

NATIVE = Path(bindings.__file__).parent / "native"
SILU = Activation("silu")
FORMATS = ("F32", "BF16", "F16", *BLOCKS, *GROUPED, "BLOCK_FP8 of rows", "BLOCK_FP8 of the whole")

EVERY_RUN = (FORMATS, (False, True), (torch.float32, torch.bfloat16))
SAMPLED = pairwise(*EVERY_RUN)
RUNS = [pytest.param(*row, marks=() if row in SAMPLED else pytest.mark.soak) for row in product(*EVERY_RUN)]
"""Formats, whether gate and up are one matrix, and the type of the rows."""


class EmulatedLauncher:
    """See :class:`engine.runtimes.torch.offload.cuda_experts.Launcher`: on this machine's processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launched: list[str] = []

    def prepare(self, kernel: str) -> None:
        assert self._library.there_is(kernel.encode()), kernel

    def launch(self, kernel: str, grid: Grid, threads: int, arguments: Sequence[Any], stream: int) -> None:
        self.prepare(kernel)
        self.launched.append(kernel)
        values = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._library.launch(kernel.encode(), *grid, threads, values)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    source = Path(__file__).with_name("emulated_cuda.cpp")
    # Without optimisation: compiling takes longer than all that runs.
    options = ["-std=c++17", "-O0", "-ffp-contract=off", "-shared", "-fPIC", "-Werror", "-Wall", "-Wno-unknown-pragmas"]

    def build(folder: Path) -> None:
        folder.mkdir()
        command = [
            compiler,
            *options,
            f"-I{SOURCE.parent}",
            f"-I{NATIVE}",
            str(source),
            "-o",
            str(folder / "emulated.so"),
        ]
        subprocess.run(command, check=True)

    folder = written_once(shared_root(tmp_path_factory) / "emulated-cuda", build)
    return ctypes.CDLL(str(folder / "emulated.so"))


@pytest.fixture
def launcher(library: ctypes.CDLL) -> EmulatedLauncher:
    return EmulatedLauncher(library)


def stored(name: str, rows: int, columns: int, offset: int, seed: int) -> tuple[SlotMatrix, list[torch.Tensor]]:
    """A random matrix of the format ``name`` at ``offset``, and its bytes in order."""
    generator = torch.Generator().manual_seed(seed)
    name, _, owner = name.partition(" of ")

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 8).to(dtype)

    def part(kind: str, values: torch.Tensor, at: int) -> tuple[SlotMatrix, torch.Tensor]:
        return SlotMatrix(kind, at, values.nbytes, tuple(values.shape), values.stride()), values.view(torch.uint8)

    plain = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if name in plain:
        matrix, words = part(name, numbers(rows, columns, dtype=plain[name]), offset)
        return matrix, [words]
    if name in BLOCKS:
        words = torch.from_numpy(random_blocks(name, rows, columns, seed))
        return SlotMatrix(name, offset, words.nbytes, (rows, columns), (columns, 1)), [words]
    codes = torch.randint(0, 256, words_shape(name, (rows, columns)), generator=generator, dtype=torch.uint8)
    at = offset + codes.nbytes
    if name == "BLOCK_FP8":
        codes[codes & 127 == 127] = 3  # no NaN
        blocks = (-(-rows // BLOCK_SIDE), -(-columns // BLOCK_SIDE))
        groups = [part("F32", numbers(*{"rows": (rows, 1), "the whole": (1, 1)}.get(owner, blocks)), at)]
    elif name == "OCP_MXFP4":
        exponents = torch.randint(120, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        groups = [part("U8", exponents, at)]
    elif name == "GROUPED_NVFP4":
        own = torch.randint(0, 256, (rows, columns // 16), generator=generator, dtype=torch.uint8)
        groups = [part("U8", own, at), part("F32", numbers(1, 256), at + own.nbytes)]
    else:
        scales = part("BF16", numbers(rows, columns // 64, dtype=torch.bfloat16), at)
        groups = [scales, part("BF16", numbers(rows, columns // 64, dtype=torch.bfloat16), at + scales[0].nbytes)]
    matrix = SlotMatrix(name, offset, codes.nbytes, (rows, columns), (columns, 1), tuple(each for each, _ in groups))
    return matrix, [codes, *(words for _, words in groups)]


def expert(
    names: dict[str, str], hidden: int, ffn: int, seed: int = 0, biases: str | None = None
) -> tuple[torch.Tensor, SlotLayout]:
    """A slot with an expert whose matrices have the formats ``names``, and its layout."""
    shapes = {"gate_up": (2 * ffn, hidden), "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    matrices: dict[str, SlotMatrix] = {}
    pieces: list[torch.Tensor] = []
    size = 0
    for number, (name, kind) in enumerate(names.items()):
        matrices[name], words = stored(kind, *shapes[name], size, 10 * seed + number)
        pieces += [each.reshape(-1) for each in words]
        size = sum(piece.nbytes for piece in pieces)
    if biases is not None:
        for number, (name, length) in enumerate((("gate", ffn), ("up", ffn), ("down", hidden))):
            matrix, words = stored(biases, 1, length, size, 100 + 10 * seed + number)
            matrices[f"{name}_bias"] = replace(matrix, shape=(length,), stride=(1,))
            pieces += [each.reshape(-1) for each in words]
            size = sum(piece.nbytes for piece in pieces)
    return torch.cat(pieces), SlotLayout(size, matrices)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Only the order of the sums differs."""
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def all_of(name: str, fused: bool = False) -> dict[str, str]:
    return {"gate_up": name, "down": name} if fused else {"gate": name, "up": name, "down": name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_matrices_unpack_to_torchs_numbers(name: str, dtype: torch.dtype, launcher: EmulatedLauncher) -> None:
    slot, layout = expert(all_of(name), 512, 256)
    wanted = tensors_in(slot, layout, dtype)
    kernels = CudaExperts(launcher)
    for part, numbers in (("gate", wanted.gate), ("up", wanted.up), ("down", wanted.down)):
        found = kernels.unpacked(layout.matrices[part], slot, dtype, 0)
        assert found is not None and found.dtype == dtype
        assert torch.equal(found, numbers)


@pytest.mark.parametrize("name", BLOCKS)
def test_any_bytes_unpack_to_torchs_numbers(name: str, launcher: EmulatedLauncher) -> None:
    """Scales of every kind: zero, subnormal, infinite, and none at all."""
    numbers, nbytes = block_of(name)
    slot = torch.randint(0, 256, (64 * nbytes,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    matrix = SlotMatrix(name, 0, slot.nbytes, (16, 4 * numbers), (4 * numbers, 1))
    rest = SlotMatrix("F32", 0, 32, (1, 8), (8, 1))
    wanted = tensors_in(slot, SlotLayout(slot.nbytes, {"gate": matrix, "up": rest, "down": rest}), torch.float32).gate
    found = CudaExperts(launcher).unpacked(matrix, slot, torch.float32, 0)
    assert found is not None
    assert torch.equal(found.nan_to_num(1e30), wanted.nan_to_num(1e30))
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize(("name", "fused", "dtype"), RUNS)
def test_experts_give_torchs_results(name: str, fused: bool, dtype: torch.dtype, launcher: EmulatedLauncher) -> None:
    hidden, ffn = (512, 256) if name in BLOCKS else (192, 128)
    slots, layouts = zip(*(expert(all_of(name, fused), hidden, ffn, seed) for seed in range(3)), strict=True)
    rows = torch.randn(16, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    places = [(2, 3), (3, 13), (15, 16)]
    out = torch.full((16, hidden), float("nan"))
    kernels = CudaExperts(launcher)
    work = [ExpertRows(slot.data_ptr(), *place) for slot, place in zip(slots, places, strict=True)]
    kernels.run(work, layouts[0], SILU, rows, out, 0)
    for slot, (start, stop) in zip(slots, places, strict=True):
        weights = tensors_in(slot, layouts[0], torch.float32)
        assert_close(out[start:stop], run_expert(weights, SILU, rows[start:stop].float()))
    untouched = [row for row in range(16) if not any(start <= row < stop for start, stop in places)]
    assert out[untouched].isnan().all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["BF16", "Q8_0", "MXFP4", "AFFINE4", "OCP_MXFP4", "GROUPED_NVFP4"])
def test_biases_and_a_gate_of_its_own(name: str, fused: bool, launcher: EmulatedLauncher) -> None:
    gate = Activation("clamped", 1.7, 7.0, 1.0)
    slot, layout = expert(all_of(name, fused), 256, 128, biases="BF16" if name == "BF16" else "F32")
    rows = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(5, 256)
    CudaExperts(launcher).run([ExpertRows(slot.data_ptr(), 0, 5)], layout, gate, rows, out, 0)
    wanted = run_expert(tensors_in(slot, layout, torch.float32), gate, rows)
    assert_close(out, wanted)


def test_formats_may_differ_between_gate_and_down(launcher: EmulatedLauncher) -> None:
    slot, layout = expert({"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}, 512, 256)
    rows = torch.randn(2, 512)
    out = torch.zeros(2, 512)
    CudaExperts(launcher).run([ExpertRows(slot.data_ptr(), 0, 2)], layout, SILU, rows, out, 0)
    assert_close(out, run_expert(tensors_in(slot, layout, torch.float32), SILU, rows))
    assert launcher.launched == ["products<Blocks<Q4_K>, float, 8>", "products<Blocks<Q6_K>, float, 8>"]


def test_a_tokens_result_depends_on_no_other(launcher: EmulatedLauncher) -> None:
    """Neither on the tokens beside it, nor on the experts that run with it, nor on how many launches that takes."""
    slots, layouts = zip(*(expert(all_of("Q4_0"), 64, 32, seed) for seed in range(70)), strict=True)
    rows = torch.randn(91, 64)
    together, alone = torch.zeros(91, 64), torch.zeros(91, 64)
    kernels = CudaExperts(launcher)
    work = [ExpertRows(slot.data_ptr(), place, place + 1) for place, slot in enumerate(slots[1:])]
    work.append(ExpertRows(slots[0].data_ptr(), 69, 91))
    kernels.run(work, layouts[0], SILU, rows, together, 0)
    assert len(launcher.launched) == 4, "more experts than one launch takes"
    for each in work:
        for row in range(each.start, each.stop):
            kernels.run([ExpertRows(each.address, row, row + 1)], layouts[0], SILU, rows, alone, 0)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "fused"), [("Q4_K", False), ("BF16", True), ("MXFP4", False), ("AFFINE4", True)])
def test_routes_that_only_the_device_knows(
    name: str, fused: bool, dtype: torch.dtype, launcher: EmulatedLauncher
) -> None:
    """The same bits as when the host sorts tokens by expert."""
    hidden, ffn = (512, 256) if name in BLOCKS else (192, 128)
    slots, layouts = zip(*(expert(all_of(name, fused), hidden, ffn, seed, "F32") for seed in range(4)), strict=True)
    rows = torch.randn(3, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    chosen = torch.tensor([[3, 1], [1, 2], [0, 3]])
    kernels = CudaExperts(launcher)
    table = torch.tensor([slot.data_ptr() for slot in slots])
    found = kernels.run_routes(table, layouts[0], SILU, rows, chosen, 0)
    assert found.shape == (6, hidden)
    alone = torch.zeros(3, hidden)
    for token, experts in enumerate(chosen.tolist()):
        for place, each in enumerate(experts):
            kernels.run([ExpertRows(slots[each].data_ptr(), token, token + 1)], layouts[0], SILU, rows, alone, 0)
            assert torch.equal(found[2 * token + place], alone[token])


def test_what_the_kernels_do_not_read_is_left_to_torch() -> None:
    across = SlotMatrix("BF16", 0, 64 * 32 * 2, (32, 64), (1, 32))
    assert part_of(across) is None, "stored column by column"
    assert part_of(SlotMatrix("F32", 0, 40 * 4, (4, 10), (10, 1))) is None, "no whole pieces"
    assert part_of(SlotMatrix("Q4_K", 2, 4 * 144, (4, 256), (256, 1))) is None, "blocks at odd addresses"
    assert part_of(SlotMatrix("MXFP4", 1, 4 * 17, (4, 32), (32, 1))) is not None
    assert part_of(SlotMatrix("F64", 0, 64 * 8, (1, 64), (64, 1))) is None
    _, layout = expert({"gate": "Q4_0", "up": "Q8_0", "down": "Q4_0"}, 64, 32)
    assert parts_of(layout) is None, "gate and up in two formats"
    _, layout = expert(all_of("Q4_0"), 64, 32, biases="F32")
    strange = {**layout.matrices, "down_bias": replace(layout.matrices["down_bias"], stride=(2,))}
    assert parts_of(SlotLayout(layout.size, strange)) is None
    kernels = CudaExperts(EmulatedLauncher(None))  # type: ignore[arg-type]
    parts = kernels.parts(layout)
    assert parts is not None and parts.most_tokens == 8 + cuda_experts.MOST_WEIGHTS // (3 * 64 * 32)
    assert kernels.runs(layout, torch.bfloat16, parts.most_tokens)
    assert not kernels.runs(layout, torch.bfloat16, parts.most_tokens + 1)
    assert not kernels.runs(layout, torch.float16, 1)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "dbrx"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_as_files_hold_them(
    family: str, dtype: str, tiny_model: Callable[..., Path], launcher: EmulatedLauncher
) -> None:
    """The layouts of real checkpoints, interleaved and transposed ones too: run, or left to torch."""
    experts = experts_of(tiny_model(family, dtype=dtype))
    host = HostExperts(experts)
    layout = host.layout(experts.layers[0])
    kernels = CudaExperts(launcher)
    if not kernels.runs(layout, torch.float32, 3):
        assert family in ("gpt_oss", "dbrx"), "stored column by column"
        return
    slot = torch.zeros(host.slot_bytes, dtype=torch.uint8)
    for piece in host.pieces(experts.layers[0], 1):
        slot[piece.offset : piece.offset + piece.tensor.nbytes] = piece.tensor
    weights = tensors_in(slot, layout, torch.float32)
    rows = torch.randn(3, weights.gate.shape[1])
    out = torch.zeros(3, weights.down.shape[0])
    kernels.run([ExpertRows(slot.data_ptr(), 0, 3)], layout, SILU, rows, out, 0)
    assert_close(out, run_expert(weights, SILU, rows))


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch brings NVIDIA's compiler")
def test_torch_without_cuda_says_so() -> None:
    with pytest.raises(CompilingFailed, match="another maker"):
        CudaLauncher()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_every_kernel_that_may_be_asked_for_is_there(launcher: EmulatedLauncher) -> None:
    for name in FORMATS:
        for fused in (False, True):
            _, layout = expert(all_of(name, fused), 512, 256)
            CudaExperts(launcher).prepare(layout, torch.float32)
            CudaExperts(launcher).prepare(layout, torch.bfloat16)
