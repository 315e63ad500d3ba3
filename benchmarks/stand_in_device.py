"""A device for tests and simulations: buffers of its own, two queues in virtual time, and faults to order.

Running an expert reads the slot's bytes and nothing else, with the CPU's own arithmetic: the bytes lie as far from a
multiple of 64 as they do in the host's memory, because torch's matrix products round by that.

A copy scrambles its slot when it begins and fills it when it is waited for, so whoever reads too early, or the wrong
slot, gets wrong numbers. All times are those of a virtual clock that moves by given speeds, so overlap is exact and
every run is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from engine.models.formats.byte_map import ExpertPlace
from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.models.formats.number_formats import is_grouped, is_packed, stored_bytes
from engine.planning.calibration import CALIBRATION_VERSION, Calibration, Curve, ExpertShape
from engine.runtimes.torch.offload.devices import (
    CopyFailed,
    DeviceLost,
    HostPiece,
    OutOfDeviceMemory,
    ResidentExpert,
    Slot,
    SlotLayout,
    SlotMatrix,
)
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.local import make_cpu_backend
from engine.runtimes.torch.offload.tensor_backend import TensorBackend

ALIGNMENT = 64
WIDTHS = {"U8": np.uint8, "BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


@dataclass(frozen=True)
class Speeds:
    """Virtual seconds of everything; the defaults make copying ten times as slow as the CPU."""

    copy_s: float = 10.0
    """One slab."""
    gpu_s: float = 0.1
    """One expert on the device, whatever the tokens."""
    cpu_s: float = 1.0
    """One expert on the CPU with one token; every further token takes a tenth of that."""
    activation_s: float = 0.01
    """One transfer of activations."""

    def on_cpu(self, tokens: int) -> float:
        return self.cpu_s * (1.0 + 0.1 * (tokens - 1))

    def on_gpu(self, tokens: int) -> float:
        return self.gpu_s


@dataclass(frozen=True)
class CalibratedSpeeds(Speeds):
    """The speeds of a machine as measured, or assumed, whatever the size of the weights that are really moved."""

    cpu: Curve = field(default_factory=lambda: Curve((1,), (1.0,)))
    gpu: Curve = field(default_factory=lambda: Curve((1,), (0.1,)))

    @classmethod
    def of(cls, calibration: Calibration) -> CalibratedSpeeds:
        """Raises ValueError if the calibration knows no GPU."""
        if calibration.gpu is None or calibration.activation_copy is None:
            raise ValueError(f"the calibration of {calibration.machine!r} has no GPU")
        return cls(
            copy_s=calibration.weight_copy,
            activation_s=calibration.activation_copy.at(1) / 2,
            cpu=calibration.cpu,
            gpu=calibration.gpu,
        )

    def on_cpu(self, tokens: int) -> float:
        return self.cpu.at(tokens)

    def on_gpu(self, tokens: int) -> float:
        return self.gpu.at(tokens)


def calibration_of(speeds: Speeds, expert_bytes: int, hidden: int = 48, ffn: int = 56) -> Calibration:
    """What measuring a machine of these speeds would give."""
    tokens = (1, 2, 1024)
    return Calibration(
        version=CALIBRATION_VERSION,
        machine="stand-in",
        shape=ExpertShape(hidden=hidden, ffn=ffn, dtype="F32", expert_bytes=expert_bytes),
        cpu=Curve(tokens, tuple(speeds.on_cpu(count) for count in tokens)),
        memory_read=expert_bytes / speeds.cpu_s,
        gpu=Curve((1,), (speeds.gpu_s,)),
        weight_copy=speeds.copy_s,
        activation_copy=Curve((1,), (2 * speeds.activation_s,)),
    )


@dataclass
class Clock:
    seconds: float = 100.0


@dataclass(frozen=True)
class Operation:
    """One entry of the trace; ``start`` and ``end`` in virtual seconds."""

    kind: Literal["copy", "run", "download", "upload", "cpu", "fill"]
    """``fill``: a copy begun between two layers."""
    start: float
    end: float
    nbytes: int = 0
    slot: Slot | None = None


@dataclass(eq=False)
class CopyTicket:
    slot: Slot
    pieces: tuple[HostPiece, ...]
    end: float
    failed: bool
    altered: bool = False
    done: bool = False


@dataclass(frozen=True)
class Work:
    start: float
    end: float

    def interval(self) -> tuple[float, float]:
        return self.start, self.end


@dataclass
class Faults:
    """What goes wrong: the number of the copy that is refused, or arrives damaged; of the run or upload there is no
    room for; of the copy that arrives with other bytes, which nobody
    is told; of the operation at which the device is lost. Counted from 1 over the device's life; empty: nothing."""

    copies_refused: set[int] = field(default_factory=set)
    copies_damaged: set[int] = field(default_factory=set)
    copies_altered: set[int] = field(default_factory=set)
    runs_without_room: set[int] = field(default_factory=set)
    uploads_without_room: set[int] = field(default_factory=set)
    lost_at: int | None = None
    page_locks: str | None = None


class StandInDevice:
    """See the module, and :class:`engine.runtimes.torch.offload.devices.ExpertDevice`."""

    def __init__(
        self,
        memory: int = 10**9,
        speeds: Speeds | None = None,
        faults: Faults | None = None,
        holds_trunk: bool = False,
        runs_routes: bool = False,
    ) -> None:
        """``runs_routes``: where all experts of a layer are there, it finds those of a token by itself."""
        self.speeds = speeds or Speeds()
        self.faults = faults or Faults()
        self.clock = Clock()
        self.trace: list[Operation] = []
        self.taken_by_others = 0
        self.locked: dict[int, int] = {}
        self.buffers: dict[Slot, torch.Tensor] = {}
        self._total = memory
        self._holds_trunk = holds_trunk
        self._runs_routes = runs_routes
        self._numbers = 0
        self._pending: list[CopyTicket] = []
        self._counts = {"copy": 0, "run": 0, "upload": 0, "any": 0}
        self._copies_free = self._computing_free = 0.0
        self._in_layer = False
        self._begun: list[CopyTicket] = []
        self._read: list[weakref.ref[Any]] = []
        self._first = 0
        self._read_until: dict[Slot, float] = {}
        self._shifts: dict[Slot, int] = {}
        self._experts: dict[tuple[Any, ...], TensorBackend] = {}

    name = "the stand-in"
    torch_device = torch.device("cpu")

    @property
    def holds_trunk(self) -> bool:
        return self._holds_trunk

    def memory(self) -> tuple[int, int]:
        used = sum(buffer.nbytes - 2 * ALIGNMENT for buffer in self.buffers.values())
        return max(0, self._total - self.taken_by_others - used), self._total

    def now(self) -> float:
        return self.clock.seconds

    def allocate(self, slot_bytes: int, count: int) -> list[Slot]:
        self._operation()
        if slot_bytes * count > self.memory()[0]:
            raise OutOfDeviceMemory(f"{count} slots of {slot_bytes} bytes")
        self._numbers += 1
        slots = [Slot(self._numbers * 1000 + place, self._numbers) for place in range(count)]
        self.buffers |= {slot: torch.full((slot_bytes + 2 * ALIGNMENT,), 0xA5, dtype=torch.uint8) for slot in slots}
        return slots

    def release(self, slots: Sequence[Slot]) -> None:
        self.synchronize()
        for slot in slots:
            del self.buffers[slot]

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        if self.faults.page_locks is None:
            self.locked[address] = nbytes
        return self.faults.page_locks

    def unlock_pages(self, address: int) -> None:
        del self.locked[address]

    def prepare(self, layouts: Sequence[SlotLayout], dtype: torch.dtype) -> None:
        """There is nothing to make ready."""

    def begin(self) -> None:
        self._operation()
        self._first = len(self.trace)
        self._in_layer = True
        self._begun, self._read = [], []

    def copy(self, slot: Slot, pieces: Sequence[HostPiece]) -> CopyTicket:
        self._operation()
        number = self._count("copy")
        if number in self.faults.copies_refused:
            raise CopyFailed("a fault to order")
        start = max(self.clock.seconds, self._copies_free, self._read_until.get(slot, 0.0))
        end = self._copies_free = start + self.speeds.copy_s
        self.trace.append(
            Operation(
                "copy" if self._in_layer else "fill", start, end, sum(piece.tensor.nbytes for piece in pieces), slot
            )
        )
        self.buffers[slot].fill_(0x5A)
        altered = number in self.faults.copies_altered
        ticket = CopyTicket(slot, tuple(pieces), end, number in self.faults.copies_damaged, altered)
        self._pending = [other for other in self._pending if other.slot != slot] + [ticket]
        self._begun.append(ticket)
        return ticket

    def run(
        self,
        experts: Sequence[ResidentExpert],
        layout: SlotLayout,
        gate: FamilyGate,
        rows: torch.Tensor,
        out: torch.Tensor,
        after: CopyTicket | None = None,
    ) -> None:
        for each in experts:
            mine = slice(each.start, each.stop)
            self._run_one(each.slot, layout, gate, rows[mine], out[mine], after)

    def _run_one(
        self,
        slot: Slot,
        layout: SlotLayout,
        gate: FamilyGate,
        rows: torch.Tensor,
        out: torch.Tensor,
        after: CopyTicket | None,
    ) -> None:
        self._operation()
        if self._count("run") in self.faults.runs_without_room:
            raise OutOfDeviceMemory("a fault to order")
        if after is not None:
            assert after.slot == slot
            if after.failed:
                raise CopyFailed("a fault to order, found late")
            self._finish(after)
        start = max(self.clock.seconds, self._computing_free, after.end if after is not None else 0.0)
        end = self._computing_free = self._read_until[slot] = start + self.speeds.on_gpu(len(rows))
        self._read += [weakref.ref(rows.untyped_storage()), weakref.ref(out.untyped_storage())]
        self.trace.append(Operation("run", start, end, slot=slot))
        shift = self._shifts[slot]
        key = (slot, shift, rows.dtype, gate)
        if key not in self._experts:
            inside = SlotExperts(self.buffers[slot][shift:], layout)
            self._experts[key], _ = make_cpu_backend(inside, {0: gate}, rows.dtype, cpu_threads=1)
        out.copy_(self._experts[key].outputs(0, rows, torch.zeros(len(rows), 1, dtype=torch.int64)))

    def whole_layer(self, slots: Sequence[Slot], layout: SlotLayout, dtype: torch.dtype) -> list[Slot] | None:
        return list(slots) if self._runs_routes else None

    def run_routes(
        self, layer: list[Slot], layout: SlotLayout, gate: FamilyGate, rows: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, Work]:
        k = experts.shape[1]
        out = torch.zeros(experts.numel(), rows.shape[1])
        flat = experts.reshape(-1)
        self.begin()
        for expert in flat.unique().tolist():
            mine = (flat == expert).nonzero()[:, 0]
            found = torch.zeros(len(mine), rows.shape[1])
            self._run_one(layer[expert], layout, gate, rows[mine // k], found, None)
            out[mine] = found
            self._read.clear()
        return out, self.end()

    def end(self) -> Work:
        """Only what this layer began is waited for."""
        self._operation()
        self._in_layer = False
        assert all(reference() is not None for reference in self._read), "memory was given back while it was read"
        for ticket in self._begun:
            if not ticket.failed:
                self._finish(ticket)
        done = [op for op in self.trace[self._first :] if op.kind in ("copy", "run")]
        self.clock.seconds = max([self.clock.seconds, *(op.end for op in done)])
        return Work(min(op.start for op in done), max(op.end for op in done)) if done else Work(0.0, 0.0)

    def download(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        self._operation()
        return [self._transfer("download", tensor) for tensor in tensors]

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self._operation()
        if self._count("upload") in self.faults.uploads_without_room:
            raise OutOfDeviceMemory("a fault to order")
        return self._transfer("upload", tensor)

    def synchronize(self) -> None:
        self._operation()
        for ticket in list(self._pending):
            if not ticket.failed:
                self._finish(ticket)
        self.clock.seconds = max(self.clock.seconds, self._copies_free, self._computing_free)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _finish(self, ticket: CopyTicket) -> None:
        if ticket.done or ticket not in self._pending:
            return
        self._pending.remove(ticket)
        ticket.done = True
        buffer = self.buffers[ticket.slot]
        first = ticket.pieces[0]
        shift = self._shifts[ticket.slot] = (first.tensor.data_ptr() - first.offset - buffer.data_ptr()) % ALIGNMENT
        for piece in ticket.pieces:
            start = shift + piece.offset
            buffer[start : start + piece.tensor.nbytes] = piece.tensor.flip(0) if ticket.altered else piece.tensor

    def _transfer(self, kind: Literal["download", "upload"], tensor: torch.Tensor) -> torch.Tensor:
        start = self.clock.seconds
        self.clock.seconds += self.speeds.activation_s
        counted = tensor.nbytes if tensor.is_floating_point() else 0
        self.trace.append(Operation(kind, start, self.clock.seconds, counted))
        return tensor.clone()

    def _count(self, kind: str) -> int:
        self._counts[kind] += 1
        return self._counts[kind]

    def _operation(self) -> None:
        if self.faults.lost_at is not None and self._count("any") >= self.faults.lost_at:
            raise DeviceLost("a fault to order")


class SlotExperts:
    """One expert whose weights are a slot's bytes. See :class:`engine.models.formats.model_files.Experts`."""

    layers = (0,)
    count = 1

    def __init__(self, buffer: torch.Tensor, layout: SlotLayout) -> None:
        self._bytes = buffer.numpy()
        self._layout = layout
        self.dtype = layout.matrices["down"].format
        self.nbytes = layout.size

    def held(self, layer: int) -> range:
        return range(self.count)

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        return ExpertWeights.of({name: self._stored(part) for name, part in self._layout.matrices.items()})

    def _stored(self, place: SlotMatrix) -> StoredTensor:
        return StoredTensor(place.format, self._words(place), *map(self._stored, place.groups))

    def place(self, layer: int, expert: int) -> ExpertPlace:
        raise NotImplementedError("a slot lies in no file")

    def check_unchanged(self, layer: int | None = None) -> None:
        pass

    def _words(self, place: SlotMatrix) -> np.ndarray[Any, Any]:
        # A matrix that is stored interleaved reaches beyond its own bytes.
        whole = self._bytes[place.offset :]
        if is_grouped(place.format):
            row = stored_bytes(place.format, place.shape[1:])
            step = place.stride[0] * row // place.shape[1]
            return np.lib.stride_tricks.as_strided(whole, (place.shape[0], row), (step, 1))
        if is_packed(place.format):
            return np.reshape(whole[: place.nbytes], (place.shape[0], -1))
        width = np.dtype(WIDTHS[place.format]).itemsize
        words = whole[: len(whole) // width * width].view(WIDTHS[place.format])
        strides = tuple(step * words.itemsize for step in place.stride)
        return np.lib.stride_tricks.as_strided(words, place.shape, strides)


class TimedCpu(TensorBackend):
    """``cpu`` with its virtual time; see :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`."""

    def __init__(self, cpu: TensorBackend, device: StandInDevice) -> None:
        super().__init__(cpu.experts, cpu.dtype)
        self._cpu = cpu
        self._device = device
        self.ran: list[int] = []
        """Routes of each active expert in the last call."""

    @property
    def description(self) -> str:
        return self._cpu.description

    @property
    def result_dtype(self) -> torch.dtype:
        return self._cpu.result_dtype

    def combined(self, routed: torch.Tensor, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
        return self._cpu.combined(routed, tokens, weights)

    def run(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, scale_input: bool = False
    ) -> torch.Tensor:
        return self._cpu.run(layer, hidden, indices, weights, scale_input)

    def outputs(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._cpu.outputs(layer, hidden, indices, input_weights)
        self.ran = [count for count in indices[indices >= 0].bincount().tolist() if count]
        start = self._device.clock.seconds
        self._device.clock.seconds += sum(self._device.speeds.on_cpu(count) for count in self.ran)
        self._device.trace.append(Operation("cpu", start, self._device.clock.seconds))
        return out
