"""The native expert kernels alone: one expert at M tokens, against the rate at which this machine streams memory.

    python -m benchmarks.kernels [--shape mixtral|fine] [--sets avx512_bf16,avx2] [--rows 1,4,8] [--json]

``mixtral`` is one expert of 4096 x 14336; ``fine`` a layer of experts of 2048 x 768, eight for each token. Each
figure is the median of rounds that take turns with a plain read of the same bytes, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from engine.models.files import ExpertWeights, StoredTensor
from engine.moe.kernels.bindings import KernelChoice, available
from engine.moe.kernels.layers import Gate, LayerExperts
from engine.moe.kernels.pool import Pool, physical_cores

ROWS = (1, 2, 4, 8, 12, 16, 64, 256)


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
    threads: int
    rows: int
    milliseconds: float
    spread: float
    gigabytes_per_second: float
    read_shard: float
    gigaflops: float


def aligned(values: NDArray[np.uint16] | NDArray[np.uint32]) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """A copy that begins at a multiple of 64 bytes, as the weights of a prepared model do."""
    memory = np.empty(values.nbytes + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


def stored(generator: np.random.Generator, rows: int, columns: int, dtype: str) -> StoredTensor:
    """Random weights of about 1 / sqrt(columns), made from random bits: quick for gigabytes."""
    if dtype == "F32":
        values = generator.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns).astype(np.float32)
        return StoredTensor("F32", aligned(values.view(np.uint32)))
    words = generator.integers(0, 1 << 16, size=(rows, columns), dtype=np.uint16)
    exponent = np.uint16(127 - int(np.log2(columns)) // 2 << 7)
    return StoredTensor("BF16", aligned((words & np.uint16(0x807F)) | exponent))


def layer_of(shape: Shape, dtype: str, kernels: str) -> LayerExperts:
    generator = np.random.default_rng(0)
    weights = {
        expert: ExpertWeights(
            gate=stored(generator, shape.ffn, shape.hidden, dtype),
            up=stored(generator, shape.ffn, shape.hidden, dtype),
            down=stored(generator, shape.hidden, shape.ffn, dtype),
        )
        for expert in range(shape.experts)
    }
    return LayerExperts(weights, shape.experts, Gate("silu"), KernelChoice(kernels, "benchmark"))


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
        self.shape, self.kernels = shape, kernels
        self.layer = layer_of(shape, dtype, kernels)
        self.pool = Pool(threads)
        self.expert_bytes = shape.hidden * shape.ffn * 3 * (2 if dtype == "BF16" else 4)
        self.memory = np.ones(max(self.expert_bytes, 1 << 28) // 8, dtype=np.uint64)

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

        def run() -> None:
            self.layer.run(self.pool, x, routes, scales, rows, shape.k, to)

        nbytes = len(np.unique(indices)) * self.expert_bytes
        timed(run)
        seconds, reads = [], []
        for _ in range(rounds_of(timed(run) + self.read(nbytes))):
            seconds.append(timed(run))
            reads.append(self.read(nbytes))
        middle = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4)
        return Figure(
            shape=shape.name,
            kernels=self.kernels,
            threads=self.pool.threads,
            rows=rows,
            milliseconds=middle * 1e3,
            spread=(high - low) / middle,
            gigabytes_per_second=nbytes / middle / 1e9,
            read_shard=statistics.median(reads) / middle,
            gigaflops=6.0 * indices.size * shape.hidden * shape.ffn / middle / 1e9,
        )

    def close(self) -> None:
        self.pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="mixtral")
    parser.add_argument("--sets", default=",".join(available()[:1]), help="sets of kernels, separated by commas")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of tokens, separated by commas")
    parser.add_argument("--dtype", choices=("BF16", "F32"), default="BF16", help="of the weights")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = []
    if not given.json:
        print("| experts | kernels | threads | tokens | ms | spread | GB/s | of reading | GFLOP/s |")
        print("|---|---|---|---|---|---|---|---|---|")
    for kernels in filter(None, given.sets.split(",")):
        bench = Bench(SHAPES[given.shape], given.dtype, kernels, given.threads)
        for rows in map(int, given.rows.split(",")):
            figure = bench.figure(rows)
            figures.append(asdict(figure))
            if not given.json:
                print(
                    f"| {figure.shape} | {figure.kernels} | {figure.threads} | {figure.rows} | "
                    f"{figure.milliseconds:.2f} | {figure.spread:.0%} | {figure.gigabytes_per_second:.1f} | "
                    f"{figure.read_shard:.0%} | {figure.gigaflops:.0f} |",
                    flush=True,
                )
        bench.close()
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
