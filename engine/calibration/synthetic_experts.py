"""The cost of an expert of a given shape, measured with made-up weights where no model's experts are at hand.

A node of a ring is asked for it before it has any weight of the model, and answers within about a second.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.calibration.calibration_file import calibration_key, load_calibration
from engine.calibration.expert_cost import curve_of, measure
from engine.calibration.memory_rate import memory_rate
from engine.errors import ModelError
from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.models.formats.number_formats import (
    BLOCKS,
    NVFP4_GROUP,
    is_grouped,
    is_packed,
    scales_shape,
    stored_bytes,
    words_dtype,
    words_shape,
)
from engine.moe.kernels.bindings import FORMATS, choose
from engine.moe.kernels.layers import Gate, LayerExperts
from engine.moe.kernels.pool import Pool, physical_cores, shared_pool
from engine.planning.calibration import Curve, ExpertShape, Processor
from engine.system.free_memory import available_bytes

TOKENS = (1, 2, 4, 8, 16, 64)
"""Numbers of tokens measured."""
BUDGET_S = 1.0
"""Time for measuring a shape in seconds; the fewest rounds are measured however long they take."""
CYCLE_BYTES = 256 << 20
"""Bytes of the experts that are run in turn: more than the caches of most processors hold."""
AT_ONCE_ROUNDS = 7
AT_ONCE_S = 0.15
"""Time of each round in which experts of several processes are measured, in seconds."""
_SMALL = {"BF16": 0x3C24, "F16": 0x211F, "F32": 0x3C23D70A}
"""Words of 0.01 in the plain formats that the kernels read."""
_TABLE_NUMBERS = 256
"""Numbers in the table of an NVFP4 matrix."""
_FILLING, _MXFP4_FILLING = 0x21, 0x78
"""Bytes that make blocks of small normal numbers: 0x2121 is 0.01 as a scale, and 0x78 is the exponent of 2 ** -8."""
_DTYPE = re.compile(r"[A-Za-z0-9_-]{1,16}")
_OPERATIONS_PER_BYTE = 4.0
"""Operations per byte of memory read: a guess for a CPU whose kernels cannot be measured here."""

_known: dict[tuple[ExpertShape, str, int | None], Curve] = {}


def check_shape(shape: ExpertShape) -> None:
    """Raises ModelError for an expert that cannot be measured here."""
    sound = _DTYPE.fullmatch(shape.dtype) and 0 < shape.hidden < 1 << 24 and 0 < shape.ffn < 1 << 24
    if not sound or not 0 < shape.expert_bytes < 1 << 50:
        raise ModelError("Experts were to be measured that no model has; update the older of the two.", "bad-input")
    nbytes, most = _measured_bytes(shape), available_bytes() // 4
    if nbytes > most:
        raise ModelError(
            f"An expert of {shape.hidden} × {shape.ffn} numbers takes {nbytes} bytes, and {most} may be taken here to "
            "measure it: free some memory there, or choose another model.",
            kind="memory",
        )


def _formats(shape: ExpertShape) -> tuple[str, str] | None:
    """The number formats of synthetic weights: that of gate and up, and that of down; None if the kernels read no
    suitable one.

    In files of packed weights, down often has another format: the one that comes nearest to the expert's bytes.
    """
    if shape.dtype not in FORMATS:
        return None
    if not is_packed(shape.dtype):
        return shape.dtype, shape.dtype
    if shape.dtype == "BLOCK_FP8":
        return shape.dtype, shape.dtype
    if is_grouped(shape.dtype):
        return (shape.dtype, shape.dtype) if _group(shape) else None
    if shape.hidden % BLOCKS[shape.dtype][0]:
        return None
    down = shape.expert_bytes - 2 * stored_bytes(shape.dtype, (shape.ffn, shape.hidden))
    possible = [shape.dtype, *(name for name in FORMATS if name != shape.dtype and not is_grouped(name))]
    fitting = [name for name in possible if not is_packed(name) or shape.ffn % BLOCKS[name][0] == 0]
    size = (shape.hidden, shape.ffn)
    return shape.dtype, min(fitting, key=lambda name: abs(stored_bytes(name, size) - down))


def _codes_bytes(shape: ExpertShape) -> int:
    return 3 * stored_bytes(shape.dtype, (shape.ffn, shape.hidden))


def _group(shape: ExpertShape) -> int | None:
    """Numbers of a group of a grouped format that come nearest to the expert's bytes, with scales and biases of two
    bytes; None if no group divides its rows."""
    fitting = [size for size in (32, 64, 128) if shape.hidden % size == 0 and shape.ffn % size == 0]
    if shape.dtype == "OCP_MXFP4":
        fitting = fitting[:1]
    left = shape.expert_bytes - (_codes_bytes(shape) if fitting else 0)
    return min(fitting, key=lambda size: abs(4 * shape.weights // size - left), default=None)


def _measured_bytes(shape: ExpertShape) -> int:
    """Bytes of one made-up expert; 0 if none is made for this number format."""
    formats = _formats(shape)
    if formats is None:
        return 0
    first, last = formats
    if first == "GROUPED_NVFP4":
        return _codes_bytes(shape) + shape.weights // NVFP4_GROUP + 3 * stored_bytes("F32", (_TABLE_NUMBERS,))
    if first == "BLOCK_FP8":
        return _codes_bytes(shape) + 3 * stored_bytes("F32", scales_shape((shape.ffn, shape.hidden)))
    if is_grouped(first):
        scales = shape.weights // (_group(shape) or 1)
        return _codes_bytes(shape) + scales * (1 if first == "OCP_MXFP4" else 4)
    return 2 * stored_bytes(first, (shape.ffn, shape.hidden)) + stored_bytes(last, (shape.hidden, shape.ffn))


def expert_curve(shape: ExpertShape, dtype: str, threads: int | None, rate: float) -> Curve:
    """Seconds of one expert of ``shape`` over its tokens.

    From this machine's calibration, or measured now. Where none of our kernels runs: the time for reading its weights
    at ``rate`` bytes per second, unpacked if they are packed.
    """
    key = (shape, dtype, threads)
    if key not in _known:
        kept = load_calibration(shape, calibration_key(dtype, threads, None))
        if kept is not None:
            _known[key] = kept.cpu
        elif choose("bfloat16" if dtype == "bfloat16" else "float32").native and _formats(shape) is not None:
            side = SyntheticCpuSide(shape, dtype, threads or physical_cores())
            figures = measure(side, None, lambda: rate, time.perf_counter, budget_s=BUDGET_S, tokens=TOKENS)
            _known[key] = curve_of(figures.cpu)
        else:
            _known[key] = Processor(rate, rate * _OPERATIONS_PER_BYTE, unpacks=True).curve(shape)
    return _known[key]


class SyntheticCpuSide:
    """A :class:`engine.calibration.expert_cost.CpuSide` of made-up experts of ``shape``, one per call."""

    experts_per_call = 1

    def __init__(self, shape: ExpertShape, dtype: str, threads: int) -> None:
        choice = choose("bfloat16" if dtype == "bfloat16" else "float32")
        each = max(shape.expert_bytes, _measured_bytes(shape))
        self._count = max(1, min(32, min(CYCLE_BYTES, available_bytes() // 4) // each))
        weights = {expert: _like(shape) for expert in range(self._count)}
        self._layer = LayerExperts(weights, self._count, Gate("silu"), choice)
        self._pool = shared_pool(threads)
        self._calls: dict[int, _Call] = {}
        self._next = 0

    def prepare(self, tokens: int) -> None:
        if tokens not in self._calls:
            self._calls[tokens] = _Call(self._layer.hidden, tokens)

    def run(self, tokens: int) -> None:
        self._calls[tokens].run(self._layer, self._pool, self._next)
        self._next = (self._next + 1) % self._count


class _Call:
    """Activations and results of one expert's call with ``tokens`` tokens of ``hidden`` numbers."""

    def __init__(self, hidden: int, tokens: int) -> None:
        self._tokens = tokens
        self._hidden = np.full((tokens, hidden), 0.01, dtype=np.float32)
        self._indices = np.zeros((tokens, 1), dtype=np.int32)
        self._weights = np.ones((tokens, 1), dtype=np.float32)
        self._out = np.empty((tokens, hidden), dtype=np.float32)

    def run(self, layer: LayerExperts, pool: Pool, expert: int) -> None:
        self._indices.fill(expert)
        layer.run(
            pool,
            self._hidden.ctypes.data,
            self._indices.ctypes.data,
            self._weights.ctypes.data,
            self._tokens,
            1,
            sum_to=self._out.ctypes.data,
        )


def experts_at_once(shape: ExpertShape, threads: int, processes: int) -> float:
    """Number of experts that ``processes`` processes of ``threads`` threads run in the time in which one process runs
    one.

    They share memory, and perhaps a cache, but each has experts of its own. Raises ModelError if an expert of ``shape``
    does not fit in memory.
    """
    choice = choose("float32" if shape.dtype == "F32" else "bfloat16")
    if processes < 2:
        return 1.0
    if not choice.native or _formats(shape) is None:
        return max(1.0, memory_rate(threads * processes) / memory_rate(threads))
    check_shape(shape)
    count = max(1, min(32, min(CYCLE_BYTES, available_bytes() // 4) // _measured_bytes(shape)))
    experts_each = max(1, count // processes)
    count = experts_each * processes
    weights = {expert: _like(shape) for expert in range(count)}

    def rate(process: int, pool: Pool, layer: LayerExperts, together: threading.Barrier) -> float:
        first = process * experts_each
        call = _Call(layer.hidden, 1)
        together.wait()
        begun, done = time.perf_counter(), 0
        while time.perf_counter() - begun < AT_ONCE_S:
            call.run(layer, pool, first + done % experts_each)
            done += 1
        return done / (time.perf_counter() - begun)

    with ThreadPoolExecutor(processes, thread_name_prefix="measuring experts") as several:
        pools = [Pool(threads) for _ in range(processes)]
        layers = [LayerExperts(weights, count, Gate("silu"), choice) for _ in range(processes)]
        rounds: list[float] = []
        for _ in range(1 + AT_ONCE_ROUNDS):
            alone = rate(0, pools[0], layers[0], threading.Barrier(1))
            all_of_them = threading.Barrier(processes)
            found = several.map(rate, range(processes), pools, layers, [all_of_them] * processes)
            rounds.append(sum(found) / alone)
        for pool in pools:
            pool.close()
    # In the first one the processor and its tables of pages were still cold.
    return max(1.0, min(float(processes), statistics.median(rounds[1:])))


def _like(shape: ExpertShape) -> ExpertWeights:
    """Weights of ``shape`` made of small normal numbers. Subnormal ones would take longer."""
    formats = _formats(shape)
    assert formats is not None
    first, last = formats

    def stored(name: str, rows: int, columns: int) -> StoredTensor:
        if name == "BLOCK_FP8":
            codes = np.full((rows, columns), _FILLING, dtype=np.uint8)
            scales = np.full(scales_shape((rows, columns)), _SMALL["F32"], dtype=np.uint32)
            return StoredTensor(name, codes, StoredTensor("F32", scales))
        if name == "GROUPED_NVFP4":
            codes = np.full(words_shape(name, (rows, columns)), _FILLING, dtype=np.uint8)
            own = StoredTensor("U8", np.full((rows, columns // NVFP4_GROUP), _FILLING, dtype=np.uint8))
            table = StoredTensor("F32", np.full((1, _TABLE_NUMBERS), _SMALL["F32"], dtype=np.uint32))
            return StoredTensor(name, codes, own, table)
        if is_grouped(name):
            codes = np.full(words_shape(name, (rows, columns)), _FILLING, dtype=np.uint8)
            groups = (rows, columns // (_group(shape) or 1))
            if name == "OCP_MXFP4":
                return StoredTensor(name, codes, StoredTensor("U8", np.full(groups, _MXFP4_FILLING, dtype=np.uint8)))
            small = StoredTensor("BF16", np.full(groups, _SMALL["BF16"], dtype=np.uint16))
            return StoredTensor(name, codes, small, small)
        if is_packed(name):
            filling = _MXFP4_FILLING if name == "MXFP4" else _FILLING
            return StoredTensor(name, np.full(words_shape(name, (rows, columns)), filling, dtype=np.uint8))
        return StoredTensor(name, np.full((rows, columns), _SMALL[name], dtype=words_dtype(name)))

    return ExpertWeights(
        stored(first, shape.ffn, shape.hidden),
        stored(first, shape.ffn, shape.hidden),
        stored(last, shape.hidden, shape.ffn),
    )
