"""The two sides that :mod:`engine.calibration.expert_cost` measures: a model's experts, run by the kernels that answers
use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from engine.ipc.progress import ProgressCallback
from engine.models.formats.model_files import Experts, ExpertWeights
from engine.runtimes.torch.offload.cuda_device import find_gpu
from engine.runtimes.torch.offload.devices import DeviceError, ExpertDevice, ResidentExpert, said_slower
from engine.runtimes.torch.offload.gates import Activation, FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.local import make_cpu_backend
from engine.runtimes.torch.offload.torch_tensors import NAMES
from engine.system.free_memory import available_bytes

CYCLE_BYTES = 2 << 30
"""Working set of the experts measured in turn, in bytes: far larger than the processor's caches, and read from the disk
only once."""

Call = tuple[int, torch.Tensor]
"""A layer and some of its experts, int32 [experts]."""


class LocalCpuSide:
    """See :class:`engine.calibration.expert_cost.CpuSide`. Reads the experts once before measuring, so that they are in
    memory."""

    def __init__(self, experts: Experts, dtype: str, experts_per_token: int, cpu_threads: int | None) -> None:
        self._dtype = {name: dtype for dtype, name in NAMES.items()}[dtype]
        # Every activation costs about the same; the commonest stands for all.
        silu = Activation("silu")
        gates = dict.fromkeys(experts.layers, FamilyGate(silu, silu))
        self.cpu, self.notices = make_cpu_backend(experts, gates, self._dtype, cpu_threads)
        first = experts.expert(experts.layers[0], 0)
        self._hidden = first.gate.shape[1]
        self._calls = calls_in_turn(experts, min(max(1, experts_per_token), experts.count))
        self._next = 0
        self._inputs: dict[int, torch.Tensor] = {}
        for layer, chosen in self._calls:
            for expert in chosen.tolist():
                read_once(experts.expert(layer, expert))

    @property
    def description(self) -> str:
        return self.cpu.description

    @property
    def experts_per_call(self) -> int:
        return len(self._calls[0][1])

    def prepare(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        self._inputs[tokens] = torch.randn(tokens, self._hidden, generator=generator).to(self._dtype)

    def run(self, tokens: int) -> None:
        layer, chosen = self._calls[self._next]
        self._next = (self._next + 1) % len(self._calls)
        with torch.inference_mode():
            self.cpu.outputs(layer, self._inputs[tokens], chosen.expand(tokens, -1).contiguous())


def calls_in_turn(experts: Experts, together: int, limit: int | None = None) -> list[Call]:
    """Groups of ``together`` experts, from the layers in turn, as many as ``limit`` bytes hold (at least one).

    ``limit`` None: CYCLE_BYTES, or half of the free memory if that is less.
    """
    if limit is None:
        limit = min(CYCLE_BYTES, available_bytes() // 2)
    expert_bytes = experts.nbytes // (experts.count * len(experts.layers))
    groups = [range(first, first + together) for first in range(0, experts.count - together + 1, together)]
    pairs = [(layer, group) for group in groups for layer in experts.layers]
    return [
        (layer, torch.tensor(list(group), dtype=torch.int32))
        for layer, group in pairs[: max(1, limit // max(1, expert_bytes * together))]
    ]


def read_once(weights: ExpertWeights) -> None:
    """Bring an expert's weights from the disk into memory."""
    for tensor in weights.parts:
        tensor.words.max()


class DeviceGpuSide:
    """See :class:`engine.calibration.expert_cost.GpuSide`: some of the model's experts, copied to ``device`` and run as
    in an answer.

    Takes memory for a few experts. Raises DeviceError if the device has none, or is lost.
    """

    def __init__(self, device: ExpertDevice, host: HostExperts, dtype: str, experts_per_token: int) -> None:
        self._device = device
        self._host = host
        self._dtype = {name: dtype for dtype, name in NAMES.items()}[dtype]
        silu = Activation("silu")
        self._gate = FamilyGate(silu, silu)
        experts = host.experts
        self._hidden = experts.expert(experts.layers[0], 0).gate.shape[1]
        calls = calls_in_turn(experts, 1)
        self._pieces = [host.pieces(layer, int(chosen[0])) for layer, chosen in calls]
        self._next = 0
        self._layout = host.layout(experts.layers[0])
        self._experts = min(max(1, experts_per_token), experts.count)
        slower = device.prepare([self._layout], self._dtype)
        self.lines = [] if slower is None else [said_slower(device.name, slower)]
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots = device.allocate(host.slot_bytes, self._experts + 2)
        try:
            self._device.begin()
            for slot in self._slots:
                self._device.copy(slot, host.pieces(experts.layers[0], 0))
            self._wait()
        except BaseException:
            with contextlib.suppress(DeviceError):
                device.release(self._slots)
            raise

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def experts_per_call(self) -> int:
        return self._experts

    def run(self, tokens: int) -> None:
        rows, out = self.rows(tokens)
        work = [
            ResidentExpert(slot, place * tokens, (place + 1) * tokens)
            for place, slot in enumerate(self._slots[: self._experts])
        ]
        self._device.begin()
        self._device.run(work, self._layout, self._gate, rows, out)
        self._wait()

    def copy(self) -> None:
        self.start_copies(1)()

    def operations(self, count: int) -> None:
        number = self._device.upload(torch.ones(1))
        for _ in range(count):
            number.add_(1)
        self._device.synchronize()

    def activations(self, tokens: int) -> None:
        rows, _ = self.rows(tokens)
        (there,) = self._device.download(rows[:tokens])
        self._device.upload(there)
        self._device.synchronize()

    def start_copies(self, count: int) -> Callable[[], tuple[float, float]]:
        self._device.begin()
        for index in range(count):
            self._device.copy(self._slots[self._experts + index % 2], self._pieces[self._next])
            self._next = (self._next + 1) % len(self._pieces)
        return self._wait

    def close(self) -> None:
        """Return the memory. Raises DeviceLost."""
        try:
            self._device.release(self._slots)
        finally:
            self._host.close()

    def _wait(self) -> tuple[float, float]:
        work = self._device.end()
        self._device.synchronize()
        return work.interval()

    def rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations of ``tokens`` tokens for each expert of a call, and buffers for the results, on the device."""
        if tokens not in self._inputs:
            generator = torch.Generator().manual_seed(tokens)
            rows = torch.randn(self._experts * tokens, self._hidden, generator=generator)
            there = self._device.upload(rows.to(self._dtype))
            self._inputs[tokens] = there, self._device.upload(torch.zeros_like(rows))
        return self._inputs[tokens]


def gpu_side(
    experts: Experts, dtype: str, experts_per_token: int, progress: ProgressCallback
) -> tuple[DeviceGpuSide | None, list[str]]:
    """The GPU with some of ``experts``, and lines for the person; None if none can be measured."""
    try:
        device = find_gpu()
        if device is None:
            return None, ["No GPU that torch can use was found: only the CPU was measured."]
        return open_gpu_side(device, experts, dtype, experts_per_token, progress)
    except DeviceError as error:
        return None, [f"The GPU could not be measured ({error}): only the CPU was."]


def open_gpu_side(
    device: ExpertDevice, experts: Experts, dtype: str, experts_per_token: int, progress: ProgressCallback
) -> tuple[DeviceGpuSide, list[str]]:
    """``device`` with some of ``experts``, whose pages are locked as they would be in an answer. Raises DeviceError."""
    host = HostExperts(experts)
    try:
        lines = host.lock(device.lock_pages, device.unlock_pages, progress)
        side = DeviceGpuSide(device, host, dtype, experts_per_token)
        return side, lines + side.lines
    except BaseException:
        host.close()
        raise
