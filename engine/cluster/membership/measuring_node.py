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
import shutil
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.calibration.calibration_file import MLX_GPU, calibration_key, load_calibration, load_speed
from engine.calibration.memory_rate import memory_rate
from engine.calibration.synthetic_experts import check_shape, expert_curve
from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead, CentralNode
from engine.cluster.membership.control_messages import WantedFacts
from engine.cluster.transport.exchange import Buffer, between_exchanges
from engine.cluster.weights.shard_store import RESERVE_BYTES
from engine.errors import ModelError
from engine.moe.expert_parallel import FLOAT32, HEAD, Floats, HostRows, Indices, RankContext, Routes
from engine.moe.kernels.bindings import choose
from engine.moe.kernels.pool import physical_cores, usable_cpus
from engine.planning.calibration import ExpertShape
from engine.planning.placement import Placement
from engine.planning.ring_nodes import GpuFacts, NodeFacts
from engine.runtimes import gpu_present
from engine.runtimes.mlx.runtime import open_files_kept
from engine.system.free_memory import available_bytes, memory
from engine.system.locations import locate
from engine.system.machine import gpu as first_gpu
from engine.system.machine import processor

if TYPE_CHECKING:
    from engine.runtimes.mlx.measuring import GpuFigures


SETTINGS_BYTES = 32 << 20
"""Bytes on the disk for what a shard has beside the weights: the tokenizer and headers."""
_OF_WHOLE_BLOCKS = 0.98
"""Usable part of the free disk. Experts begin and end within blocks, which they occupy entirely."""

_measuring = threading.Lock()
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
    # A layer of a ring waits for the GPU once for each token that is written, for routes and results together.
    waits_s = 0.0 if gpu is None else gpu.wait_s
    chosen = choose("bfloat16" if dtype == "bfloat16" else "float32")
    width = wanted.shape.hidden if wanted.shape is not None else 0
    there = memory()
    return NodeFacts(
        memory_total=there.total,
        memory_free=there.available,
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
        # Who asks for no expert wants a quick answer, and the driver's program takes a while on some machines.
        gpu=None if wanted.shape is None else torch_gpu(wanted.shape, dtype, threads),
    )


def torch_gpu(shape: ExpertShape | None, dtype: str, threads: int | None) -> GpuFacts | None:
    """The GPU that torch uses here, with the measurements of `privatellm bench experts` for experts of ``shape``.

    None if there is no GPU, or torch cannot use it. Nothing is measured now: that would occupy the GPU for a minute.
    """
    if importlib.util.find_spec("torch") is None or not gpu_present():
        return None
    gpu = first_gpu()
    if gpu is None:
        return None
    calibration = None if shape is None else load_calibration(shape, calibration_key(dtype, threads, gpu.name))
    measured = calibration if calibration is not None and calibration.gpu is not None else None
    return GpuFacts(
        name=gpu.name,
        memory_total=gpu.total,
        memory_free=min(gpu.free, gpu.total),
        calibration=measured,
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
        with open_files_kept():
            from engine.runtimes.mlx.measuring import measure_gpu

        _gpus[wanted.shape] = measure_gpu(wanted.shape, min(budget, available_bytes()) // 4)
    return _gpus[wanted.shape]


def this_machine() -> str:
    """Identifier of this machine, the same for all its processes. It reveals nothing else."""
    return hashlib.sha256(f"{uuid.getnode()} {platform.node()}".encode()).hexdigest()[:16]


def runtimes() -> list[str]:
    """The runtimes installed here, the default first. None of them is imported."""
    torch = ["torch"] if importlib.util.find_spec("torch") is not None else []
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    native = ["native"] if choose("bfloat16").native else []
    mlx = ["mlx"] if importlib.util.find_spec("mlx_lm") is not None else []
    # On a Mac native stands in for models that mlx does not run.
    return [*mlx, *native, *torch] if apple else [*native, *torch, *mlx]


def libraries() -> dict[str, str]:
    """Versions of the libraries by runtime. The native runtime needs none."""
    versions = {name: _version_of(name) for name in set(runtimes()) - {"native"}}
    return {name: version for name, version in versions.items() if version}


@functools.cache
def _version_of(name: str) -> str:
    """Empty if the library is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


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


# --- layers of a ring ------------------------------------------------------------------------------------------------

EXPERTS = 8
PER_TOKEN = 2
LAYER_ROUNDS = 60
_PLACEMENT = Placement((0,), 2, (tuple((expert % 2,) for expert in range(EXPERTS)),))


class _LocalExchange:
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
    layers = RingLayers(RankContext("measuring", HEAD, _PLACEMENT, "fast"), _LocalExchange(HEAD, lambda sent: sent))
    row = np.ones((1, width), np.float32)
    weights = np.full((1, PER_TOKEN), 0.5, np.float32)

    def layer(indices: Indices) -> None:
        layers.begin_pass()
        layers.assign(0, Routes(indices, weights))
        layers.send(row, width, FLOAT32)
        layers.receive()

    return _median(layer)


class _NoExperts:
    """An :class:`engine.cluster.central.ExpertRunner` that computes nothing."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._rows = np.ones((PER_TOKEN, width), np.float32)

    def run_experts(
        self,
        layer: int,
        hidden: Floats,
        indices: Indices,
        weights: Floats,
        extra: Sequence[int],
        scale: bool,
        reads: bool,
    ) -> Floats:
        return self._rows


@functools.cache
def central_seconds(width: int) -> float:
    """The same for a layer of central mode, for the head and one follower together, which take turns."""
    answers: list[bytes] = []
    asked: list[bytes] = []
    runner = _NoExperts(width)
    others = _LocalExchange(1, lambda sent: asked[-1])
    node = CentralNode(RankContext("measuring", 1, _PLACEMENT, "fast"), others, runner)

    def answer(sent: bytes) -> bytes:
        if answers:
            return answers.pop()
        asked[:] = [sent]
        node.serve_layer()
        answers.append(others.sent)
        return b""

    head = CentralHead(RankContext("measuring", HEAD, _PLACEMENT, "fast"), _LocalExchange(HEAD, answer))
    row = np.ones((1, width), np.float32)
    weights = np.full((1, PER_TOKEN), 0.5, np.float32)
    rows = np.ones((PER_TOKEN, width), np.float32)

    def layer(indices: Indices) -> None:
        head.assign(0, Routes(indices, weights), HostRows(row, False))
        head.send(rows, width, FLOAT32)
        head.receive()

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
