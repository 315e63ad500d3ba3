"""A node's own figures for the planner: its memory, how fast it reads it, and the cost of one expert of the model.

Figures that a benchmark measured on this machine before are used if they are for the same experts. Otherwise they are
measured now, in about a second, with made-up weights of the same shape. No weight of the model is needed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.calibration.calibration_file import calibration_key, load_calibration
from engine.calibration.measuring import never_falling
from engine.calibration.speed_file import MLX_GPU, load_speed
from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead, CentralNode, Floats
from engine.cluster.membership.control_messages import NodeFacts, WantedFacts
from engine.cluster.transport.exchange import Buffer
from engine.cluster.transport.exchange_timing import between_exchanges
from engine.cluster.weights.share_store import RESERVE_BYTES
from engine.errors import ModelError
from engine.models.files import ExpertWeights, StoredTensor
from engine.models.locations import locate
from engine.moe.expert_parallel import Indices, Words
from engine.moe.kernels.bindings import choose
from engine.moe.kernels.cpu_threads import usable_cpus
from engine.moe.kernels.layers import Gate, LayerExperts
from engine.moe.kernels.pool import Pool, physical_cores, shared_pool
from engine.moe.rank_context import HEAD, RankContext
from engine.planning.calibration import Curve, ExpertShape, Processor
from engine.planning.placement import Placement
from engine.system.free_memory import available_bytes, memory
from engine.system.machine import processor

if TYPE_CHECKING:
    from engine.runtimes.mlx.measuring import GpuFigures


TOKENS = (1, 2, 4, 8, 16, 64)
BUDGET_S = 1.0
"""Seconds for measuring experts, beside the two rounds that are always measured."""
CYCLE_BYTES = 256 << 20
"""Bytes of the experts that are run in turn: more than the caches of most processors hold."""
READ_BYTES = 256 << 20
SETTINGS_BYTES = 32 << 20
"""Bytes on the disk for what a shard has beside the weights: the tokenizer and headers."""
_OF_WHOLE_BLOCKS = 0.98
"""Usable part of the free disk. Experts begin and end within blocks, which they occupy entirely."""
AT_ONCE_ROUNDS = 7
AT_ONCE_S = 0.15
"""Seconds of each round in which experts of several processes are measured."""
_WIDTH = {"BF16": 2, "F16": 2, "F32": 4}
_DTYPE = re.compile(r"[A-Za-z0-9_-]{1,16}")
_OPERATIONS_PER_BYTE = 4.0
"""Operations per byte of memory read: a guess for a CPU whose kernels cannot be measured here."""

_measuring = threading.Lock()
_known: dict[tuple[ExpertShape, str, int | None], Curve] = {}
_rates: dict[int, float] = {}
_gpus: dict[ExpertShape | None, GpuFigures] = {}


def measure_node(wanted: WantedFacts, threads: int | None = None) -> NodeFacts:
    """This node's figures, measured at most once per shape and process. One caller at a time, and not while it answers.

    Raises ModelError for a shape that cannot be measured here.
    """
    threads = None if threads is None else max(1, min(threads, usable_cpus()))
    if wanted.shape is not None:
        check_shape(wanted.shape)
    count = threads or physical_cores()
    dtype = "float32" if wanted.dtype == "float32" else "bfloat16"
    with _measuring:
        gpu = gpu_figures(wanted)
        speed = load_speed(calibration_key(dtype, threads, None if gpu is None else MLX_GPU))
        if gpu is not None:
            rate, curve = gpu.memory_read, gpu.expert
        else:
            rate = speed.memory_read if speed is not None else memory_rate(count)
            curve = None if wanted.shape is None else expert_curve(wanted.shape, dtype, threads, rate)
    # A layer of a ring waits for the GPU twice: for the routes, and for the results.
    waits_s = 0.0 if gpu is None else 2 * gpu.wait_s
    chosen = choose("bfloat16" if dtype == "bfloat16" else "float32")
    width = wanted.shape.hidden if wanted.shape is not None else 0
    return NodeFacts(
        memory_total=memory().total,
        memory_free=available_bytes(),
        memory_read=rate,
        disk_free=disk_free(),
        disk=this_disk(),
        expert=curve,
        instruction_set=chosen.name if chosen.native else "torch",
        runtimes=runtimes(),
        libraries=libraries(),
        processor=processor(),
        system=f"{platform.system()} {platform.machine()}",
        threads=count,
        fence_s=layer_seconds(width) + waits_s if width else 0.0,
        central_s=central_seconds(width) + 2 * waits_s if width else 0.0,
        layer_overhead_s=dict(speed.layer_overhead_s) if speed is not None else {},
        machine=this_machine(),
        unified_memory=sys.platform == "darwin" and platform.machine() == "arm64",
    )


def gpu_figures(wanted: WantedFacts) -> GpuFigures | None:
    """The costs of mlx's GPU if mlx will run; None if it will not, or the GPU cannot be queried."""
    if wanted.runtime != "mlx" or importlib.util.find_spec("mlx_lm") is None:
        return None
    from engine.runtimes.mlx.eligible import working_set_bytes

    try:
        budget = working_set_bytes()
    except ModelError:
        return None
    if budget is None:
        return None
    if wanted.shape not in _gpus:
        from engine.runtimes.mlx.measuring import measure_gpu

        _gpus[wanted.shape] = measure_gpu(wanted.shape, min(budget, available_bytes()) // 4)
    return _gpus[wanted.shape]


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


def _measured_bytes(shape: ExpertShape) -> int:
    """Bytes of one made-up expert; 0 if none is made for this number format."""
    return 3 * shape.hidden * shape.ffn * _WIDTH[shape.dtype] if shape.dtype in ("BF16", "F32") else 0


def this_machine() -> str:
    """Identifier of this machine, the same for all its processes. It reveals nothing else."""
    return hashlib.sha256(f"{uuid.getnode()} {platform.node()}".encode()).hexdigest()[:16]


def runtimes() -> list[str]:
    """The runtimes installed here, the default first. None of them is imported."""
    found = ["torch"] if importlib.util.find_spec("torch") is not None else []
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    native = ["native"] if choose("bfloat16").native else []
    mlx = ["mlx"] if importlib.util.find_spec("mlx_lm") is not None else []
    # On a Mac native stands in for models that mlx does not run.
    return [*mlx, *native, *found] if apple else [*native, *found, *mlx]


def libraries() -> dict[str, str]:
    """Versions of the libraries by runtime. The native runtime needs none."""
    found = {}
    for name in set(runtimes()) - {"native"}:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def disk_free() -> int:
    """Bytes that a shard may take on the disk of the models."""
    try:
        free = shutil.disk_usage(_on_disk(locate("models"))).free
    except OSError:
        return 0
    return max(0, round((free - RESERVE_BYTES - SETTINGS_BYTES) * _OF_WHOLE_BLOCKS))


def this_disk() -> str:
    """Identifier of the disk of the models, the same for all processes that use it. It reveals nothing else."""
    with contextlib.suppress(OSError):
        device = _on_disk(locate("models")).stat().st_dev
        return hashlib.sha256(f"{this_machine()} {device}".encode()).hexdigest()[:16]
    return ""


def _on_disk(folder: Path) -> Path:
    """``folder``, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def memory_rate(threads: int) -> float:
    """Bytes per second at which this machine reads its memory, measured over a quarter of a gigabyte."""
    if threads not in _rates:
        words = np.ones(min(READ_BYTES, max(1 << 24, available_bytes() // 4)) // 4, dtype=np.int32)
        best = float("inf")
        pool = None
        with contextlib.suppress(ModelError):  # no native kernels here: numpy's one thread is the best there is
            pool = shared_pool(threads)
        for _ in range(3):
            start = time.perf_counter()
            if pool is None:
                words.max()
                seconds = time.perf_counter() - start
            else:
                seconds = pool.read_seconds(words.ctypes.data, words.nbytes)
            best = min(best, max(seconds, 1e-9))
        _rates[threads] = words.nbytes / best
    return _rates[threads]


def expert_curve(shape: ExpertShape, dtype: str, threads: int | None, rate: float) -> Curve:
    """Seconds of one expert of ``shape`` over its tokens.

    From this machine's calibration, or measured now. Where none of our kernels runs: the time for reading its weights
    at ``rate`` bytes per second.
    """
    key = (shape, dtype, threads)
    if key not in _known:
        kept = load_calibration(shape, calibration_key(dtype, threads, None))
        if kept is not None:
            _known[key] = kept.cpu
        elif choose("bfloat16" if dtype == "bfloat16" else "float32").native and shape.dtype in ("BF16", "F32"):
            _known[key] = _measured(shape, dtype, threads or physical_cores())
        else:
            width = _WIDTH.get(shape.dtype, 2)
            _known[key] = Processor(rate, rate * _OPERATIONS_PER_BYTE).curve(shape, width)
    return _known[key]


def _measured(shape: ExpertShape, dtype: str, threads: int) -> Curve:
    pool = shared_pool(threads)
    choice = choose("bfloat16" if dtype == "bfloat16" else "float32")
    count = max(1, min(32, min(CYCLE_BYTES, available_bytes() // 4) // max(shape.expert_bytes, _measured_bytes(shape))))
    layer = LayerExperts({e: _like(shape) for e in range(count)}, count, Gate("silu"), choice)
    samples: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    start, turn = time.perf_counter(), 0
    for index in range(50):
        for tokens in TOKENS:
            if index >= 2 and time.perf_counter() - start > BUDGET_S:
                break
            samples[tokens].append(_one(layer, pool, tokens, turn % count))
            turn += 1
    medians = [max(1e-9, statistics.median(samples[tokens][1:] or samples[tokens])) for tokens in TOKENS]
    return Curve(TOKENS, tuple(never_falling(medians)))


def experts_at_once(shape: ExpertShape, threads: int, processes: int) -> float:
    """How many experts that many processes of ``threads`` threads run together in the time in which one runs one: they
    have one memory, and perhaps one cache, but each has experts of its own. Raises ModelError if an expert of ``shape``
    cannot be had in memory."""
    choice = choose("float32" if shape.dtype == "F32" else "bfloat16")
    if processes < 2:
        return 1.0
    if not choice.native or shape.dtype not in ("BF16", "F32"):
        return max(1.0, memory_rate(threads * processes) / memory_rate(threads))
    check_shape(shape)
    count = max(1, min(32, min(CYCLE_BYTES, available_bytes() // 4) // _measured_bytes(shape)))
    each = max(1, count // processes)
    count = each * processes
    weights = {expert: _like(shape) for expert in range(count)}

    def rate(process: int, pool: Pool, layer: LayerExperts, together: threading.Barrier) -> float:
        first = process * each
        together.wait()
        begun, done = time.perf_counter(), 0
        while time.perf_counter() - begun < AT_ONCE_S:
            _one(layer, pool, 1, first + done % each)
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


def _one(layer: LayerExperts, pool: Pool, tokens: int, expert: int) -> float:
    hidden = np.full((tokens, layer.hidden), 0.01, dtype=np.float32)
    indices = np.full((tokens, 1), expert, dtype=np.int32)
    weights = np.ones((tokens, 1), dtype=np.float32)
    out = np.empty((tokens, layer.hidden), dtype=np.float32)
    start = time.perf_counter()
    layer.run(
        pool,
        hidden.ctypes.data,
        indices.ctypes.data,
        weights.ctypes.data,
        tokens,
        1,
        sum_to=out.ctypes.data,
    )
    return time.perf_counter() - start


def _like(shape: ExpertShape) -> ExpertWeights:
    """Weights of ``shape`` made of small normal numbers. Subnormal ones would take longer."""
    word = np.float32(0.01).view(np.uint32)

    def stored(rows: int, columns: int) -> StoredTensor:
        if shape.dtype == "F32":
            return StoredTensor("F32", np.full((rows, columns), word, dtype=np.uint32))
        return StoredTensor("BF16", np.full((rows, columns), int(word) >> 16, dtype=np.uint16))

    return ExpertWeights(
        stored(shape.ffn, shape.hidden), stored(shape.ffn, shape.hidden), stored(shape.hidden, shape.ffn)
    )


# --- layers of a ring ------------------------------------------------------------------------------------------------

EXPERTS = 8
PER_TOKEN = 2
LAYER_ROUNDS = 60
_PLACEMENT = Placement((0,), 2, (tuple((expert % 2,) for expert in range(EXPERTS)),))


class _Here:
    """An exchange between two nodes within this process; see :class:`engine.cluster.transport.exchange.Exchange`.

    ``other`` makes the other node's contribution from what this one sent.
    """

    name = "none"
    size = 2
    idle_s = 0.0

    def __init__(self, rank: int, other: Callable[[bytes], bytes]) -> None:
        self.rank = rank
        self.sent = b""
        self._other = other

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self.sent = b"".join(parts)

    def receive(self) -> list[memoryview]:
        found = [memoryview(self.sent), memoryview(self._other(self.sent))]
        return found if self.rank == HEAD else found[::-1]

    def missing(self) -> list[int]:
        return []

    def close(self) -> None:
        return


@functools.cache
def layer_seconds(width: int) -> float:
    """Median seconds of one MoE layer of a decoding step without experts and transfer.

    This is the cost of assigning routes, framing and parsing. ``width``: numbers of a hidden state.
    """
    layers = RingLayers(RankContext("measuring", HEAD, _PLACEMENT, "fast"), _Here(HEAD, lambda sent: sent))
    row = np.ones((1, width), np.float32)
    weights = np.full((1, PER_TOKEN), 0.5, np.float32)

    def local(indices: Indices, weights: object, extra: tuple[int, ...]) -> Words:
        return row

    def layer(indices: Indices) -> None:
        layers.begin_pass()
        layers.run(0, indices, weights, local, width, row.dtype)

    return _median(layer)


class _NoExperts:
    """An :class:`engine.cluster.central.ExpertRunner` that computes nothing."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._rows = np.ones((PER_TOKEN, width), np.float32)

    def run_experts(
        self, layer: int, hidden: Floats, indices: Indices, weights: Floats, extra: Sequence[int], scale: bool
    ) -> Floats:
        return self._rows


@functools.cache
def central_seconds(width: int) -> float:
    """The same for a layer of central mode, for the head and one follower together, which take turns."""
    answers: list[bytes] = []
    asked: list[bytes] = []
    runner = _NoExperts(width)
    others = _Here(1, lambda sent: asked[-1])
    node = CentralNode(RankContext("measuring", 1, _PLACEMENT, "fast"), others, runner)

    def answer(sent: bytes) -> bytes:
        if answers:
            return answers.pop()
        asked[:] = [sent]
        node.serve_layer()
        answers.append(others.sent)
        return b""

    head = CentralHead(RankContext("measuring", HEAD, _PLACEMENT, "fast"), _Here(HEAD, answer))
    row = np.ones((1, width), np.float32)
    weights = np.full((1, PER_TOKEN), 0.5, np.float32)
    rows = np.ones((PER_TOKEN, width), np.float32)

    def local(indices: Indices, weights: object, extra: tuple[int, ...]) -> Words:
        return rows

    def layer(indices: Indices) -> None:
        head.hidden(row, False)
        head.run(0, indices, weights, local, width, row.dtype)

    return _median(layer)


def _median(layer: Callable[[Indices], None]) -> float:
    """Median seconds of ``layer`` with routes to one expert of each node, so that both contribute a row."""
    random = np.random.default_rng(0)
    between = between_exchanges()
    samples = []
    for _ in range(LAYER_ROUNDS):
        mine, other = 2 * random.integers(EXPERTS // 2), 2 * random.integers(EXPERTS // 2) + 1
        indices = np.array([[mine, other]], np.int32)
        between()
        begun = time.perf_counter()
        layer(indices)
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples)
