"""The kernels for ARM on emulated processors, with packed and grouped weights, compared with plain C on this one.

It needs a compiler for ARM and the emulator (Debian: qemu-user, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross).
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.packed_blocks import block_of, random_blocks
from engine.models.formats.number_formats import BLOCKS, GROUPED, words_shape
from engine.moe.kernels import bindings
from engine.moe.kernels.bindings import FORMATS, Matrix
from engine.moe.kernels.pool import Pool

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
NATIVE = Path(bindings.__file__).parent / "native"
I8MM, DOTPROD, NEITHER = "max", "cortex-a76", "cortex-a72"
"""Processors: with matrix products of bytes, with dot products of bytes, with neither."""
NAMES = (*BLOCKS, *(name for name in GROUPED if name != "BLOCK_FP8"))
ROWS, TOKENS = 35, 20
FEW = 16
"""Most tokens that are not multiplied in panels."""
Floats = NDArray[np.float32]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bindings.path() is None, reason="the native kernels were not built"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} here"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here"),
]


@dataclass(frozen=True)
class Weights:
    """What lies in a file, and rows of input."""

    name: str
    columns: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8] | Floats | None
    biases: Floats | None
    x: Floats

    @property
    def group(self) -> int:
        if self.scales is None:
            return 0
        return {"OCP_MXFP4": 32, "GROUPED_NVFP4": 16}.get(self.name, 64)

    def matrix(self) -> Matrix:
        scales, biases = (None if part is None else part.ctypes.data for part in (self.scales, self.biases))
        codes, dtype, kind = self.codes.ctypes.data, FORMATS[self.name], FORMATS["F32"]
        return Matrix(codes, ROWS, self.columns, self.columns, dtype, self.group, scales, biases, kind, 0)

    def sent(self) -> bytes:
        parts = (self.codes, self.scales, self.biases)
        sizes = [0 if part is None else part.nbytes for part in parts]
        head = [FORMATS[self.name], self.group, FORMATS["F32"], ROWS, self.columns, TOKENS, *sizes]
        rest = b"".join(part.tobytes() for part in (*parts, self.x) if part is not None)
        return np.array(head, np.int64).tobytes() + rest


@functools.cache
def weights(name: str) -> Weights:
    """More columns than a panel has, and no whole number of units where the blocks are small."""
    generator = np.random.default_rng(1)
    values = block_of(name)[0] if name in BLOCKS else 64
    columns = 1280 if values == 256 else 1024 + 256 + max(64, values) + 32 * (values == 32)
    x = generator.standard_normal((TOKENS, columns)).astype(np.float32)
    x[generator.random(x.shape) < 0.005] *= 30
    if name in BLOCKS:
        return Weights(name, columns, random_blocks(name, ROWS, columns), None, None, x)
    codes = generator.integers(0, 256, words_shape(name, (ROWS, columns)), np.uint8)
    if name == "OCP_MXFP4":
        return Weights(name, columns, codes, generator.integers(118, 124, (ROWS, columns // 32), np.uint8), None, x)
    if name == "GROUPED_NVFP4":  # and the number that each byte stands for
        own, table = generator.integers(0, 256, (ROWS, columns // 16), np.uint8), generator.standard_normal(256)
        return Weights(name, columns, codes, own, table.astype(np.float32), x)
    scales = generator.uniform(0.01, 0.02, (ROWS, columns // 64)).astype(np.float32)
    middle = 2.0 ** (int(name[-1]) - 1) + generator.standard_normal(scales.shape)
    return Weights(name, columns, codes, scales, (-scales * middle).astype(np.float32), x)


@functools.cache
def plain(name: str) -> Floats:
    """Each row's products in plain C."""
    given, pool = weights(name), Pool(1)
    weight, out = given.matrix(), np.full((TOKENS, ROWS), np.nan, np.float32)
    try:
        for row in range(TOKENS):
            code = bindings.load().pllm_linear(
                pool.handle, bindings.SETS["scalar"], ctypes.addressof(weight), None, given.x[row].ctypes.data,
                given.columns, 1, out[row].ctypes.data, ROWS,
            )  # fmt: skip
            assert code == 0
    finally:
        pool.close()
    return out


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("emulated") / "products"
    sources = [*sorted(NATIVE.glob("*.c")), Path(__file__).with_name("emulated_products.c")]
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", f"-I{NATIVE}", "-static"]
    subprocess.run([COMPILER, *flags, *map(str, sources), "-lm", "-pthread", "-o", str(made)], check=True)
    yield made
    _products.cache_clear()


@dataclass(frozen=True)
class Products:
    """Those of the first row, of the first two, and so on, as tokens that are written and that are read."""

    written: tuple[Floats, ...]
    read: tuple[Floats, ...]


@functools.cache
def _products(program: Path, cpu: str, name: str) -> Products:
    command = [EMULATOR, "-cpu", cpu, str(program)]
    result = subprocess.run(command, input=weights(name).sent(), capture_output=True, check=True)
    rows = np.frombuffer(result.stdout, np.float32).reshape(-1, ROWS)
    found = tuple(np.split(rows, np.cumsum(np.repeat(range(1, TOKENS + 1), 2))[:-1]))
    return Products(found[::2], found[1::2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cpu", [I8MM, DOTPROD, NEITHER])
def test_products_are_those_of_plain_c(program: Path, cpu: str, name: str) -> None:
    """The same whole numbers, where bytes are multiplied; float32 panels do not round their input."""
    wanted, products = plain(name), _products(program, cpu, name)
    in_floats = (*products.written[FEW:], *products.read) if cpu == NEITHER else ()
    in_bytes = products.written[:FEW] if cpu == NEITHER else (*products.written, *products.read)
    limit = 2e-6 * float(np.abs(wanted).max())
    for found in in_bytes:
        np.testing.assert_allclose(found, wanted[: len(found)], rtol=0, atol=limit)
    for found in in_floats:
        assert np.square(found - wanted[: len(found)]).mean() < 0.0135**2 * np.square(wanted).mean()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cpu", [I8MM, DOTPROD, NEITHER])
def test_a_row_does_not_depend_on_those_beside_it(program: Path, cpu: str, name: str) -> None:
    found = _products(program, cpu, name)
    for part in (found.written[:FEW], (*found.written[FEW:], *found.read)):
        for each in part:
            assert (each == part[-1][: len(each)]).all()


@pytest.mark.parametrize("name", NAMES)
def test_both_products_of_bytes_give_the_same_bits(program: Path, name: str) -> None:
    one, other = (_products(program, cpu, name) for cpu in (I8MM, DOTPROD))
    for mine, yours in zip((*one.written, *one.read), (*other.written, *other.read), strict=True):
        assert (mine == yours).all()
