"""The native expert kernels alone: one expert at M tokens, against the rate at which this machine streams memory.

    python -m benchmarks.kernels [--shape mixtral|fine] [--sets avx512_bf16,avx2] [--formats BF16,Q4_K] [--rows 1,4,8]
                                 [--json]

``mixtral`` is one expert of 4096 x 14336; ``fine`` a layer of experts of 2048 x 768, eight for each token. Each
figure is the median of rounds that take turns with a plain read of the same bytes, so that both see the same machine.
``against one`` is how much longer so many calls of one token take: what the tokens save by sharing a call. ``as
prompt`` is how much more of the processors' time the same tokens take when they are read, as a prompt's are: their bits
do not depend on their number.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.packed_blocks import SCALES
from engine.models.formats.number_formats import BLOCK_SIDE, NVFP4_GROUP, block_size, is_grouped, scales_shape
from engine.moe.kernels.bindings import (
    ACTIVATIONS,
    FORMATS,
    SETS,
    WEIGHT_DTYPES,
    CActivation,
    Expert,
    Layer,
    Matrix,
    available,
    load,
)
from engine.moe.kernels.pool import Pool, physical_cores

ROWS = (1, 2, 4, 8, 12, 16, 64, 256)

COLUMNS = (
    "experts", "kernels", "format", "threads", "tokens", "ms", "spread", "GB/s", "read", "against one", "as prompt",
    "GFLOP/s",
)  # fmt: skip

_AFFINE = (0x3A80, 0xBC00)
"""A scale and a bias, 2**-10 and -2**-7, as words of bfloat16."""


@dataclass(frozen=True)
class Shape:
    """``experts`` of [ffn, hidden], of which each token uses ``k``."""

    name: str
    hidden: int
    ffn: int
    experts: int
    k: int


SHAPES = {
    "mixtral": Shape("mixtral", 4096, 14336, 1, 1),
    "fine": Shape("fine", 2048, 768, 64, 8),
}


@dataclass(frozen=True)
class Figure:
    """``read_shard``: of the rate at which the same bytes are read in the same rounds."""

    shape: str
    kernels: str
    format: str
    threads: int
    rows: int
    milliseconds: float
    spread: float
    gigabytes_per_second: float
    read_shard: float
    against_one: float | None
    as_prompt: float
    gigaflops: float


def stored(generator: np.random.Generator, rows: int, columns: int, dtype: str) -> NDArray[np.uint8]:
    """Random weights [rows, bytes] of about 1 / sqrt(columns), made from random bits: quick for gigabytes. They
    begin at a multiple of 64 bytes."""
    values, nbytes = block_size(dtype)
    memory = np.empty(rows * columns // values * nbytes + 64, np.uint8)
    weights = memory[-memory.ctypes.data % 64 :][: memory.size - 64]
    weights[:] = np.frombuffer(generator.bytes(weights.size), np.uint8)
    exponent = 127 - int(np.log2(columns)) // 2
    if dtype == "F32":
        words = weights.view(np.uint32)
        words[:] = words & np.uint32(0x807FFFFF) | np.uint32(exponent << 23)
    elif dtype in ("BF16", "F16"):
        mantissa = 7 if dtype == "BF16" else 10
        words16 = weights.view(np.uint16)
        words16[:] = words16 & np.uint16(0x8000 | (1 << mantissa) - 1)
        words16 |= np.uint16((exponent if dtype == "BF16" else exponent - 112) << mantissa)
    elif dtype == "BLOCK_FP8":
        weights &= np.uint8(0xBF)  # below 2, and none that is no number
    elif dtype == "MXFP4":
        weights.reshape(-1, nbytes)[:, 0] = exponent
    elif not is_grouped(dtype):
        scale = np.array([2.0**-12], np.float16).view(np.uint8)
        for at in SCALES.get(dtype, (0,)):
            weights.reshape(-1, nbytes)[:, at : at + 2] = scale
    return weights.reshape(rows, -1)


class RandomLayer:
    """The experts of a layer of ``shape`` with random weights of one format."""

    def __init__(self, shape: Shape, dtype: str, kernels: str) -> None:
        generator = np.random.default_rng(0)
        number = FORMATS[dtype]
        self._kept: list[NDArray[np.uint8]] = []
        self._experts = (Expert * shape.experts)()

        def matrix(rows: int, columns: int) -> Matrix:
            self._kept.append(stored(generator, rows, columns, dtype))
            found = Matrix(self._kept[-1].ctypes.data, rows, columns, columns, number, 0)
            if is_grouped(dtype):
                self._add_scales(found, dtype)
            return found

        for expert in self._experts:
            expert.gate, expert.up = (matrix(shape.ffn, shape.hidden) for _ in range(2))
            expert.down = matrix(shape.hidden, shape.ffn)
        self._layer = Layer(
            experts=self._experts,
            count=shape.experts,
            hidden=shape.hidden,
            ffn=shape.ffn,
            activation=CActivation(kind=ACTIVATIONS["silu"]),
            set=SETS[kernels],
            gate_dtype=number,
            up_dtype=number,
            down_dtype=number,
        )
        self.expert_bytes = sum(weights.nbytes for weights in self._kept) // shape.experts

    def _add_scales(self, matrix: Matrix, dtype: str) -> None:
        """As files usually have them: exponents for 32 values, bytes for 16 and what each stands for, two bytes for 64,
        or four for a block of FP8."""
        matrix.group = {"OCP_MXFP4": 32, "GROUPED_NVFP4": NVFP4_GROUP, "BLOCK_FP8": BLOCK_SIDE}.get(dtype, 64)
        shape = (matrix.rows, matrix.columns // matrix.group)
        if dtype == "OCP_MXFP4":
            matrix.scales = self._keep(np.full(shape, 121, np.uint8))
        elif dtype == "GROUPED_NVFP4":
            table = np.full(256, 2.0**-6, np.float32)
            matrix.scales, matrix.biases = self._keep(np.full(shape, 56, np.uint8)), self._keep(table.view(np.uint8))
        elif dtype == "BLOCK_FP8":
            size = np.full(scales_shape((matrix.rows, matrix.columns)), 2.0**-6, np.float32)
            matrix.scales, matrix.scale_dtype = self._keep(size.view(np.uint8)), WEIGHT_DTYPES["F32"]
        else:
            matrix.scales, matrix.biases = (self._keep(np.full(shape, word, "<u2").view(np.uint8)) for word in _AFFINE)
            matrix.scale_dtype = WEIGHT_DTYPES["BF16"]

    def _keep(self, scales: NDArray[np.uint8]) -> int:
        self._kept.append(scales)
        return int(scales.ctypes.data)

    def run(
        self, pool: Pool, hidden: int, indices: int, weights: int, tokens: int, k: int, reads: int, sum_to: int
    ) -> None:
        """The arguments from ``hidden`` on are addresses and sizes, as of LayerExperts."""
        code = load().pllm_experts(
            pool.handle, ctypes.addressof(self._layer), hidden, indices, weights, tokens, k, 0, reads, sum_to, None,
            None, None, 0,
        )  # fmt: skip
        if code:
            raise ValueError(f"the kernels {self._layer.set} cannot run here ({code})")


def routes_of(shape: Shape, rows: int) -> NDArray[np.int32]:
    generator = np.random.default_rng(rows)
    return np.stack([generator.permutation(shape.experts)[: shape.k] for _ in range(rows)]).astype(np.int32)


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rounds_of(first: float) -> int:
    """About a second of rounds, and never fewer than five."""
    return max(5, min(200, int(1.0 / max(first, 1e-6))))


class Bench:
    """One layer, its pool, and memory to read."""

    def __init__(self, shape: Shape, dtype: str, kernels: str, threads: int) -> None:
        self.shape, self.dtype, self.kernels = shape, dtype, kernels
        self.layer = RandomLayer(shape, dtype, kernels)
        self.pool = Pool(threads)
        self.memory = np.ones(max(self.layer.expert_bytes, 1 << 28) // 8, dtype=np.uint64)
        self.one: float | None = None

    def read(self, nbytes: int) -> float:
        """Seconds to read ``nbytes``, at the rate of a read of at least 256 MiB."""
        return self.pool.read_seconds(self.memory.ctypes.data, self.memory.nbytes) * nbytes / self.memory.nbytes

    def figure(self, rows: int) -> Figure:
        shape = self.shape
        hidden = np.random.default_rng(1).standard_normal((rows, shape.hidden), dtype=np.float32)
        indices = routes_of(shape, rows)
        weights = np.full(indices.shape, 1.0 / shape.k, dtype=np.float32)
        out = np.empty_like(hidden)
        x, routes, scales, to = (array.ctypes.data for array in (hidden, indices, weights, out))

        def run(as_prompt: int = 0) -> None:
            self.layer.run(self.pool, x, routes, scales, rows, shape.k, as_prompt, to)

        nbytes = len(np.unique(indices)) * self.layer.expert_bytes
        timed(run)
        seconds, reads, as_prompt = [], [], []
        for _ in range(rounds_of(2 * timed(run) + self.read(nbytes))):
            began = time.process_time()
            seconds.append(timed(run))
            ended = time.process_time()
            run(as_prompt=1)
            as_prompt.append((time.process_time() - ended) / (ended - began))
            reads.append(self.read(nbytes))
        middle = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4)
        if rows == 1:
            self.one = middle
        return Figure(
            shape=shape.name,
            kernels=self.kernels,
            format=self.dtype,
            threads=self.pool.threads,
            rows=rows,
            milliseconds=middle * 1e3,
            spread=(high - low) / middle,
            gigabytes_per_second=nbytes / middle / 1e9,
            read_shard=statistics.median(reads) / middle,
            against_one=rows * self.one / middle if self.one else None,
            as_prompt=statistics.median(as_prompt),
            gigaflops=6.0 * indices.size * shape.hidden * shape.ffn / middle / 1e9,
        )

    def close(self) -> None:
        self.pool.close()


def show(figure: Figure) -> None:
    shared = "" if figure.against_one is None else f"{figure.against_one:.2f}"
    print(
        f"| {figure.shape} | {figure.kernels} | {figure.format} | {figure.threads} | {figure.rows} | "
        f"{figure.milliseconds:.2f} | {figure.spread:.0%} | {figure.gigabytes_per_second:.1f} | "
        f"{figure.read_shard:.0%} | {shared} | {figure.as_prompt:.2f} | {figure.gigaflops:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="mixtral")
    parser.add_argument("--sets", default=",".join(available()[:1]), help="sets of kernels, separated by commas")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of tokens, separated by commas")
    parser.add_argument("--formats", default="BF16", help=f"of the weights, separated by commas: {', '.join(FORMATS)}")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = []
    if not given.json:
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for kernels in filter(None, given.sets.split(",")):
        for dtype in filter(None, given.formats.split(",")):
            bench = Bench(SHAPES[given.shape], dtype, kernels, given.threads)
            for rows in map(int, given.rows.split(",")):
                figure = bench.figure(rows)
                figures.append(asdict(figure))
                if not given.json:
                    show(figure)
            bench.close()
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
