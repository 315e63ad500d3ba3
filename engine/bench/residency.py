"""``bench residency``: the cost of idling for three packings of weights (the paper of private LLMs, algorithms 1, 2).

A chain of matrix products stands for the layers of a model. Between two layers the benchmark waits, longer and longer,
and measures whether the weights are still wired. What counts is how long an array was not used: an array of one layer
idles for as many waits as there are layers, one of all layers for a single wait. Where no driver wires memory for a
GPU there is nothing to measure. No model is loaded.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.calibration.samples import Spread, figure
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Bench, BenchResult
from engine.ipc.progress import ProgressCallback
from engine.models.folders.model_folder import check_space
from engine.models.formats.safetensors_files import encode_header
from engine.system.free_memory import available_bytes
from engine.system.locations import ensure
from engine.system.machine import processor
from engine.system.temporary_folders import temporary_folder

Packing = Literal["unstacked", "by layer", "prestacked"]
PACKINGS: tuple[Packing, ...] = ("unstacked", "by layer", "prestacked")
"""Packings of the matrices. ``unstacked``: one array for each matrix. ``by layer``: one for each layer, as this program
packs a layer's experts. ``prestacked``: one for all layers, as the paper packs each expert."""

NOTHING = {"kind": "residency", "waits_ms": [], "seconds": {}}
"""Data of a run that measured nothing."""
MATRICES = 3
"""Matrices per layer, as in the paper: those of one expert."""
WAITS_MS = (0, *(2**power for power in range(12)))
"""Waits between two layers in milliseconds: 0, 1, 2, 4, ... 2048."""
PAPER = "40 layers of 3 matrices of 8192 × 8192 on a Mac Studio with an M2 Ultra"

LAYERS = 40
"""Number of layers, as in the paper: how long an array idles grows with it."""
NOT_WIRED = (
    "There is nothing to measure on this system: no driver wires memory for a GPU and lets go of what idles. "
    "The benchmark is for Macs with the runtime mlx."
)
LARGEST = 8192
_STEP = 256
_MEMORY_SHARE = 0.1
_WAITING_S = 20.0
"""Maximum seconds of waiting for the samples of one wait. One sample is always taken."""
_TENSOR = "weight"
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Size:
    """``layers`` of MATRICES matrices [n, n] in bfloat16."""

    layers: int
    n: int

    @property
    def nbytes(self) -> int:
        """Bytes of one packing."""
        return self.layers * MATRICES * self.n * self.n * 2


class Multiplier(Protocol):
    """Multiplies a row by the matrices of one layer, one after the other, and waits for the result."""

    @property
    def description(self) -> str: ...

    def reset(self) -> None:
        """Begin with the first row again."""
        ...

    def layer(self, index: int) -> None: ...

    def close(self) -> None: ...


def size_for(memory: int, layers: int = LAYERS) -> Size:
    """The largest matrices of which ``layers`` layers take a tenth of ``memory`` bytes, at most the paper's. Pure."""
    n = int((_MEMORY_SHARE * memory / (layers * MATRICES * 2)) ** 0.5) // _STEP * _STEP
    return Size(layers, max(_STEP, min(LARGEST, n)))


def idle_ms(packing: Packing, wait_ms: int, layers: int) -> int:
    """Milliseconds of waiting between two uses of one array. Pure."""
    return wait_ms if packing == "prestacked" else wait_ms * layers


def samples_for(wait_ms: int, layers: int, most: int) -> int:
    """The number of samples of a wait: ``most``, or fewer if that took too long. Pure."""
    return max(1, min(most, int(_WAITING_S / max(1e-9, wait_ms * layers / 1000.0))))


def bench_residency(
    request: Bench,
    report: ProgressCallback,
    cancelled: Callable[[], bool],
    size: Size | None = None,
    waits_ms: tuple[int, ...] | None = None,
) -> BenchResult:
    """Run all packings with all ``waits_ms`` (None: WAITS_MS). Raises ModelError if disk or memory are too small,
    Cancelled."""
    size, waits_ms = size or size_for(available_bytes()), waits_ms or WAITS_MS
    if not _wants_mlx(request):
        return BenchResult(id=request.id, title="Residency", columns=[], rows=[], notes=[NOT_WIRED], data=NOTHING)
    from engine.runtimes.mlx.packing import MlxMultiplier

    with _folder(size) as folder:
        write_matrices(folder, size, report)
        seconds: dict[Packing, list[list[float]]] = {}
        description = ""
        for packing in PACKINGS:
            multiplier: Multiplier = MlxMultiplier(folder, packing, size.layers, MATRICES, size.n)
            try:
                description = multiplier.description
                seconds[packing] = measure(multiplier, size, packing, request.rounds, waits_ms, report, cancelled)
            finally:
                multiplier.close()
    return _result(request, size, waits_ms, seconds, description)


def measure(
    multiplier: Multiplier,
    size: Size,
    packing: Packing,
    rounds: int,
    waits_ms: tuple[int, ...],
    report: ProgressCallback,
    cancelled: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Algorithm 2: per wait, the seconds of each sample without the waiting."""
    samples_by_side = []
    for place, wait_ms in enumerate(waits_ms):
        report(f"{packing}, waiting {wait_ms} ms", place, len(waits_ms), "")
        multiplier.reset()
        for layer in range(size.layers):  # the warm-up
            multiplier.layer(layer)
        samples = []
        for _ in range(samples_for(wait_ms, size.layers, rounds)):
            multiplier.reset()
            working = 0.0
            for layer in range(size.layers):
                if cancelled():
                    raise Cancelled("Stopped while measuring.")
                begun = clock()
                multiplier.layer(layer)
                working += clock() - begun
                _wait(wait_ms / 1000.0, cancelled)
            samples.append(working)
        samples_by_side.append(samples)
    return samples_by_side


def write_matrices(folder: Path, size: Size, report: ProgressCallback) -> None:
    """The same matrices as safetensors, each by itself (``0-0.safetensors`` and on) and all in one
    (``stacked.safetensors``)."""
    shape = (size.layers, MATRICES, size.n, size.n)
    random = np.random.default_rng(0)
    done = 0
    with (folder / "stacked.safetensors").open("wb") as stacked:
        stacked.write(encode_header([(_TENSOR, "BF16", shape)], {"format": "pt"}))
        for layer in range(size.layers):
            for number in range(MATRICES):
                with _matrix_path(folder, layer, number).open("wb") as single:
                    single.write(encode_header([(_TENSOR, "BF16", (size.n, size.n))], {"format": "pt"}))
                    for start in range(0, size.n, _ROWS_AT_ONCE):
                        words = _random_words(random, min(_ROWS_AT_ONCE, size.n - start), size.n)
                        single.write(words.tobytes())
                        stacked.write(words.tobytes())
                done += 2 * size.nbytes // (size.layers * MATRICES)
                report("writing matrices", done, 2 * size.nbytes, "bytes")


def _wants_mlx(request: Bench) -> bool:
    """Raises ModelError if mlx was asked for and is not installed."""
    installed = importlib.util.find_spec("mlx") is not None
    if request.load.runtime == "mlx":
        if not installed:
            raise ModelError("mlx is not installed; choose another runtime for this benchmark.", "bad-input")
        return True
    return request.load.runtime == "auto" and installed and sys.platform == "darwin" and platform.machine() == "arm64"


@contextmanager
def _folder(size: Size) -> Iterator[Path]:
    """A folder for the matrices, which is deleted afterwards."""
    base = ensure("data")
    check_space(base, 2 * size.nbytes, "This benchmark")
    with temporary_folder("bench-residency-", base) as folder:
        yield folder


def _matrix_path(folder: Path, layer: int, number: int) -> Path:
    return folder / f"{layer}-{number}.safetensors"


def _random_words(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint16]:
    """bfloat16 words whose size keeps a chain of products from growing or vanishing."""
    values = random.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)
    words: NDArray[np.uint16] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return words


def _wait(seconds: float, cancelled: Callable[[], bool]) -> None:
    """Sleep, and check now and then whether to stop."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(min(left, 0.1))
        if left > 0.1 and cancelled():
            return


def _result(
    request: Bench,
    size: Size,
    waits_ms: tuple[int, ...],
    seconds: dict[Packing, list[list[float]]],
    description: str,
) -> BenchResult:
    rows: list[list[str | int | float | None]] = []
    for place, wait_ms in enumerate(waits_ms):
        spreads = [Spread.of(seconds[packing][place]) for packing in PACKINGS]
        samples = len(seconds["unstacked"][place])
        cells = [str(spread.mapped(lambda value: value * 1000.0)) for spread in spreads]
        rows.append([wait_ms, idle_ms("unstacked", wait_ms, size.layers), *cells[:2], wait_ms, cells[2], samples])
    spread = size.nbytes / 1e9
    return BenchResult(
        id=request.id,
        title=f"Residency: {size.layers} layers of {MATRICES} matrices {size.n} × {size.n} in bfloat16",
        columns=["wait, ms", "idle, ms", "unstacked, ms", "by layer, ms", "idle, ms", "prestacked, ms", "samples"],
        rows=rows,
        notes=[
            f"{processor()}: {description}.",
            f"Median (range) of the time without the waits; {figure(spread)} GB of weights in each packing.",
            "An array idles for so long between two uses: unstacked and by layer for the waits of all layers, "
            "prestacked for one. Prestacked is the paper's packing of one expert; by layer is that of this program, "
            "which uses a layer's array whenever any of its experts runs.",
            f"The paper has {PAPER}: prestacked stays even up to a wait of 512 ms, unstacked up to one of 8 ms, "
            "which is 320 ms of idling.",
        ],
        data={
            "kind": "residency",
            "rounds": request.rounds,
            "processor": processor(),
            "runtime": description,
            "layers": size.layers,
            "matrices_per_layer": MATRICES,
            "n": size.n,
            "bytes": size.nbytes,
            "waits_ms": list(waits_ms),
            "seconds": {packing: seconds[packing] for packing in PACKINGS},
        },
    )
