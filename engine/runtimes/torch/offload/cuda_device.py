"""An NVIDIA GPU as the hybrid executor sees it: slots in device memory, a stream for copies and one for experts.

Three streams work at once. The trunk's is torch's current one. Copies run on their own, each after the last expert that
reads its slot (an event per slot). Experts run on a third, after the trunk's work so far and after their copy. At the
end of a layer the trunk's stream waits for the experts'. What experts read and write is allocated by the trunk and kept
until then, so no stream reuses memory that another still uses. A copy begun between two layers is waited for by the run
that is given its ticket.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.runtimes.torch.offload.cuda_experts import CompilingFailed, CudaExperts, CudaLauncher, ExpertRows, supports
from engine.runtimes.torch.offload.devices import (
    CopyFailed,
    DeviceLost,
    HostPiece,
    OutOfDeviceMemory,
    ResidentExpert,
    Slot,
    SlotLayout,
    SlotMatrix,
    Ticket,
    tensors_in,
)
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.local_torch import run_expert
from engine.system.machine import driver_problem

OLDEST_CAPABILITY = (7, 5)
"""Compute capability of the oldest GPUs that torch's kernels support."""
ALIGNMENT = 256
"""Alignment of slots in bytes, which matrix kernels prefer."""

_PORTABLE = 1
_READ_ONLY = 8
"""cudaHostRegisterPortable and cudaHostRegisterReadOnly: every context may copy from the pages, and none writes to
them."""


@dataclass(frozen=True)
class CudaWork:
    """See :class:`engine.runtimes.torch.offload.devices.LayerWork`. ``begun``: the host's clock when ``first`` was
    recorded."""

    begun: float
    first: torch.cuda.Event | None
    last: torch.cuda.Event

    def interval(self) -> tuple[float, float]:
        """Beginning and end on the host's clock, by the time between the events. Waits for the end."""
        if self.first is None:
            return self.begun, self.begun
        with _translated():
            self.last.synchronize()
            return self.begun, self.begun + self.first.elapsed_time(self.last) / 1000.0


class CudaDevice:
    """See the module, and :class:`engine.runtimes.torch.offload.devices.ExpertDevice`. One thread at a time."""

    def __init__(self, index: int | None = None) -> None:
        """Raises DeviceLost if CUDA cannot be started."""
        with _translated():
            self._index = torch.cuda.current_device() if index is None else index
            self._device = torch.device("cuda", self._index)
            self._name = str(torch.cuda.get_device_name(self._device))
            self._copies = torch.cuda.Stream(self._device)
            self._computing = torch.cuda.Stream(self._device)
        # torch prefers cuDNN's attention on recent GPUs, which makes a plan for every length of a conversation: tens of
        # milliseconds for each token of an answer.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Parts of a sum are added in float32, as on the CPU.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._groups: dict[int, torch.Tensor] = {}
        self._slots: dict[Slot, torch.Tensor] = {}
        self._last_read: dict[Slot, torch.cuda.Event] = {}
        self._numbers = 0
        self._begun = 0.0
        self._first: torch.cuda.Event | None = None
        self._joined = False
        self._in_layer = False
        self._copied: torch.cuda.Event | None = None
        self._kernels: CudaExperts | None = None
        self._read_by_trunk: torch.cuda.Event | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def holds_trunk(self) -> bool:
        return True

    def memory(self) -> tuple[int, int]:
        """Free and total bytes. Memory that torch holds but does not use counts as free: it is used first, or returned
        when memory runs out."""
        with _translated():
            free, total = torch.cuda.mem_get_info(self._device)
            # memory_reserved and memory_allocated flatten and sort all of it, twice, which is much for every step.
            found = torch.cuda.memory_stats_as_nested_dict(self._device)
            held, used = (found[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
        return int(free) + int(held) - int(used), int(total)

    def now(self) -> float:
        return time.perf_counter()

    # --- slots ----------------------------------------------------------------------------------------------------

    def allocate(self, slot_bytes: int, count: int) -> list[Slot]:
        stride = slot_bytes + -slot_bytes % ALIGNMENT
        with _translated():
            memory = torch.empty(stride * count, dtype=torch.uint8, device=self._device)
            # The trunk may have given this memory back a moment ago, with work that uses it still on its way.
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
        self._numbers += 1
        self._groups[self._numbers] = memory
        slots = [Slot(self._numbers << 20 | place, self._numbers) for place in range(count)]
        for place, slot in enumerate(slots):
            self._slots[slot] = memory[place * stride : place * stride + slot_bytes]
        return slots

    def release(self, slots: Sequence[Slot]) -> None:
        # The experts' stream may still read them, and torch knows nothing of that.
        self.synchronize()
        for slot in slots:
            del self._slots[slot]
            self._last_read.pop(slot, None)
        used = {slot.group for slot in self._slots}
        for group in [group for group in self._groups if group not in used]:
            del self._groups[group]
        with _translated():
            torch.cuda.empty_cache()

    # --- the host's pages -----------------------------------------------------------------------------------------

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(address, nbytes, _PORTABLE | _READ_ONLY)
        if int(status) == 0:
            return None
        # CUDA remembers the refusal until somebody asks, and torch asks after its next kernel: let it be this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)
        return str(runtime.cudaGetErrorString(status))

    def unlock_pages(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def prepare(self, layouts: Sequence[SlotLayout], dtype: torch.dtype) -> str | None:
        """Compile our kernels, in a tenth of a second each."""
        if not supports(dtype):
            return f"there are none for {dtype}"
        try:
            with _translated():
                self._kernels = CudaExperts(CudaLauncher())
                for layout in layouts:
                    self._kernels.prepare(layout, dtype)
        except CompilingFailed as error:
            self._kernels = None
            return str(error)
        return None

    # --- a layer --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._first = None
        self._joined = False
        self._in_layer = True
        self._copied = None

    def copy(self, slot: Slot, pieces: Sequence[HostPiece]) -> Ticket:
        destination = self._slots[slot]
        with _translated(self._survived), torch.cuda.stream(self._copies):
            last_read = self._last_read.get(slot)
            if last_read is not None:
                self._copies.wait_event(last_read)
            if self._read_by_trunk is not None:
                self._copies.wait_event(self._read_by_trunk)
            if self._in_layer:
                self._mark(self._copies)
            for piece in pieces:
                there = destination[piece.offset : piece.offset + piece.tensor.nbytes]
                there.copy_(piece.tensor, non_blocking=True)
            arrived = self._copies.record_event()
        if self._in_layer:
            self._copied = arrived
        return arrived

    def run(
        self,
        experts: Sequence[ResidentExpert],
        layout: SlotLayout,
        gate: FamilyGate,
        rows: torch.Tensor,
        out: torch.Tensor,
        after: Ticket | None = None,
    ) -> None:
        with _translated():
            if not self._joined:
                self._joined = True
                self._computing.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._computing):
                self._mark(self._computing)
                if after is not None:
                    self._computing.wait_event(after)
                for expert in self._without_kernels(experts, layout, gate, rows, out):
                    self._run_by_torch(expert, layout, gate, rows, out)
                finished = self._computing.record_event()
                for expert in experts:
                    self._last_read[expert.slot] = finished

    def whole_layer(self, slots: Sequence[Slot], layout: SlotLayout, dtype: torch.dtype) -> torch.Tensor | None:
        if self._kernels is None or not self._kernels.runs(layout, dtype, 1):
            return None
        return self.upload(torch.tensor([self._slots[slot].data_ptr() for slot in slots], dtype=torch.int64))

    def run_routes(
        self, layer: torch.Tensor, layout: SlotLayout, gate: FamilyGate, rows: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, CudaWork]:
        assert self._kernels is not None
        with _translated():
            stream = torch.cuda.current_stream(self._device)
            begun, first = time.perf_counter(), torch.cuda.Event(enable_timing=True)
            first.record(stream)
            routed = self._kernels.run_routes(layer, layout, gate, rows, experts.long(), stream.cuda_stream)
            last = torch.cuda.Event(enable_timing=True)
            last.record(stream)
        self._read_by_trunk = last
        return routed, CudaWork(begun, first, last)

    def _without_kernels(
        self,
        experts: Sequence[ResidentExpert],
        layout: SlotLayout,
        gate: FamilyGate,
        rows: torch.Tensor,
        out: torch.Tensor,
    ) -> Sequence[ResidentExpert]:
        """Begin the experts that our kernels run, and return the others."""
        kernels = self._kernels
        if kernels is None:
            return experts
        few: list[ExpertRows] = []
        others: list[ResidentExpert] = []
        for each in experts:
            if kernels.runs(layout, rows.dtype, each.stop - each.start):
                few.append(ExpertRows(self._slots[each.slot].data_ptr(), each.start, each.stop))
            else:
                others.append(each)
        if few:
            kernels.run(few, layout, gate, rows, out, self._computing.cuda_stream)
        return others

    def _run_by_torch(
        self, expert: ResidentExpert, layout: SlotLayout, gate: FamilyGate, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        slot, stream = self._slots[expert.slot], self._computing.cuda_stream

        def unpacked(matrix: SlotMatrix) -> torch.Tensor | None:
            return None if self._kernels is None else self._kernels.unpacked(matrix, slot, rows.dtype, stream)

        weights = tensors_in(slot, layout, rows.dtype, unpacked)
        out[expert.start : expert.stop].copy_(run_expert(weights, gate, rows[expert.start : expert.stop]))

    def end(self) -> CudaWork:
        self._in_layer = False
        with _translated():
            if self._copied is not None:
                self._computing.wait_event(self._copied)
            last = torch.cuda.Event(enable_timing=True)
            last.record(self._computing)
            torch.cuda.current_stream(self._device).wait_event(last)
        return CudaWork(self._begun, self._first, last)

    def _mark(self, stream: torch.cuda.Stream) -> None:
        """Record when the layer's work begins, on the device's clock and on the host's."""
        if self._first is None:
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record(stream)
            self._begun = time.perf_counter()

    # --- activations ----------------------------------------------------------------------------------------------

    def download(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        with _translated():
            stream = torch.cuda.current_stream(self._device)
            # torch keeps such buffers and uses them again; they are small, unlike the weights.
            found = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for host, tensor in zip(found, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            stream.synchronize()
        return found

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        with _translated():
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            return pinned.to(self._device, non_blocking=True)

    def synchronize(self) -> None:
        with _translated():
            torch.cuda.synchronize(self._device)

    def _survived(self) -> bool:
        """Whether the device still answers after an error."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True


@contextlib.contextmanager
def _translated(survived: Callable[[], bool] | None = None) -> Iterator[None]:
    """Translates torch's errors into a device's. ``survived``: for copies, whether only the copy failed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(_first_line(error)) from error
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in ("out of memory", "alloc_failed")):
            raise OutOfDeviceMemory(_first_line(error)) from error
        if not isinstance(error, torch.AcceleratorError) and "CUDA" not in str(error):
            raise  # a mistake of ours, such as matrices that do not fit together
        if survived is not None and survived():
            raise CopyFailed(_first_line(error)) from error
        raise DeviceLost(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def find_gpu() -> CudaDevice | None:
    """The GPU that torch would use, or None."""
    return CudaDevice() if torch.cuda.is_available() and not _too_old() else None


def unusable_reason() -> str:
    """Why torch cannot use the GPU of this machine, in a few words."""
    return _too_old() or driver_problem(torch.version.cuda) or "see `nvidia-smi`"


def _too_old() -> str:
    """The problem with a GPU older than every kernel in torch; empty if there is none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return ""
    found = torch.cuda.get_device_capability()
    if found >= OLDEST_CAPABILITY:
        return ""
    oldest, its_own = (".".join(map(str, each)) for each in (OLDEST_CAPABILITY, found))
    return f"it needs compute capability {oldest}, that of a GeForce RTX 20, and the GPU has {its_own}"
