"""The interface of a device that runs experts beside the CPU, as the hybrid executor needs it: memory, copies,
computing.

A device has two queues of work that run by themselves: copies of weights, and computing. Adding work returns at once;
:meth:`ExpertDevice.end` makes the trunk wait for all of it. A slot holds one expert's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.models.formats.number_formats import is_grouped, is_packed, stored_bytes
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.local_torch import ExpertTensors, expert_tensors
from engine.runtimes.torch.offload.torch_tensors import stored_dtype
from engine.runtimes.torch.offload.torch_unpacking import unpack, unpack_groups


class DeviceError(Exception):
    """Raised if a device could not do what it was asked to."""


class OutOfDeviceMemory(DeviceError):
    """Raised if the device's memory is full. What ran before is not affected."""


class CopyFailed(DeviceError):
    """Raised if weights did not arrive. The slot holds nothing usable; the device itself goes on."""


class DeviceLost(DeviceError):
    """Raised if the device no longer works."""


@dataclass(frozen=True, order=True)
class Slot:
    """Device memory for one expert. Memory is taken and returned in whole groups of slots."""

    index: int
    group: int


@dataclass(frozen=True)
class SlotMatrix:
    """A matrix or bias inside a slot, in a number format of its own; see
    :class:`engine.models.formats.byte_map.MatrixPlace`. ``offset`` is counted from the beginning of the slot.
    ``groups`` are the scales, and then the biases, of a grouped format."""

    format: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    groups: tuple[SlotMatrix, ...] = ()


@dataclass(frozen=True)
class SlotLayout:
    """The layout of a layer's slots: the same bytes in the same order as in the host's memory.

    ``matrices`` are named as in :class:`engine.models.formats.model_files.ExpertWeights`. Only code that computes with
    them looks at their formats. All other code moves ``size`` bytes.
    """

    size: int
    matrices: Mapping[str, SlotMatrix]


@dataclass(frozen=True)
class HostPiece:
    """Bytes of the host's memory, uint8 [n], and their offset in the slot."""

    offset: int
    tensor: torch.Tensor


def tensors_in(
    slot: torch.Tensor,
    layout: SlotLayout,
    dtype: torch.dtype,
    unpacked: Callable[[SlotMatrix], torch.Tensor | None] = lambda matrix: None,
) -> ExpertTensors:
    """The expert in ``slot``, uint8 [layout.size], as tensors of ``dtype``: views if stored in it, else copies on the
    device.

    ``unpacked`` gives a packed matrix in ``dtype``, or None: then torch's operations unpack it. Raises ModelError,
    naming the number format, if torch does not compute with it.
    """

    def part(name: str) -> torch.Tensor | None:
        place = layout.matrices.get(name)
        if place is None:
            return None
        if is_packed(place.format) and (found := unpacked(place)) is not None:
            return found
        if is_grouped(place.format):
            codes = _rows_in(slot, place, stored_bytes(place.format, place.shape[1:]))
            scales, biases = (*map(plain, place.groups), None)[:2]
            return unpack_groups(codes, scales, biases, place.format, dtype)
        if is_packed(place.format):
            rows = slot[place.offset : place.offset + place.nbytes].view(place.shape[0], -1)
            return unpack(rows, place.format, dtype)
        return plain(place).to(dtype)

    def plain(place: SlotMatrix) -> torch.Tensor:
        words = slot.view(stored_dtype(place.format))
        offset = words.storage_offset() + place.offset // words.element_size()
        return words.as_strided(place.shape, place.stride, offset)

    return expert_tensors(part)


def _rows_in(slot: torch.Tensor, place: SlotMatrix, row: int) -> torch.Tensor:
    """The codes of a matrix, uint8 [rows, ``row``]."""
    step = place.stride[0] * row // place.shape[1]
    return slot.as_strided((place.shape[0], row), (step, 1), slot.storage_offset() + place.offset)


@dataclass(frozen=True)
class ResidentExpert:
    """An expert in ``slot``, perhaps still arriving, and its tokens: ``start`` to ``stop`` of a layer's rows."""

    slot: Slot
    start: int
    stop: int


def said_slower(device: str, reason: str) -> str:
    """The line for the person about the reason that :meth:`ExpertDevice.prepare` returned."""
    return f"Kernels for {device} could not be compiled ({reason}), so torch runs its experts: packed ones slowly."


Ticket = Any
"""A copy in progress, for which :meth:`ExpertDevice.run` waits."""


class LayerWork(Protocol):
    """The device's work for one layer, from the first copy or expert started to the last one finished."""

    def interval(self) -> tuple[float, float]:
        """Beginning and end in seconds of the device's clock. Waits for the end. The same number twice if nothing
        ran."""
        ...


class ExpertDevice(Protocol):
    """See the module. Tensors in and out of :meth:`run` are on ``torch_device``, where the trunk is.

    Every method but the properties may raise DeviceLost.
    """

    @property
    def name(self) -> str:
        """The hardware's name."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The torch device of the trunk's tensors."""
        ...

    @property
    def holds_trunk(self) -> bool:
        """Whether the trunk is lost with the device."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory."""
        ...

    def now(self) -> float:
        """Seconds on the clock of :meth:`LayerWork.interval`, which is the host's."""
        ...

    def allocate(self, slot_bytes: int, count: int) -> list[Slot]:
        """Memory for ``count`` slots. Raises OutOfDeviceMemory; then nothing was taken."""
        ...

    def release(self, slots: Sequence[Slot]) -> None:
        """Return slots. A group's memory is free once all of its slots were returned."""
        ...

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        """Lock the host's pages, which are only read, for direct copies. Returns the reason if refused."""
        ...

    def unlock_pages(self, address: int) -> None: ...

    def prepare(self, layouts: Sequence[SlotLayout], dtype: torch.dtype) -> str | None:
        """Prepare to run experts of ``layouts`` on tokens of ``dtype``. Returns the reason if they are slower than
        possible."""
        ...

    def begin(self) -> None:
        """Begin a layer's work."""
        ...

    def copy(self, slot: Slot, pieces: Sequence[HostPiece]) -> Ticket:
        """Start to copy weights into ``slot``, after the last :meth:`run` that reads it. Raises CopyFailed."""
        ...

    def run(
        self,
        experts: Sequence[ResidentExpert],
        layout: SlotLayout,
        gate: FamilyGate,
        rows: torch.Tensor,
        out: torch.Tensor,
        after: Ticket | None = None,
    ) -> None:
        """Start to run ``experts`` of one layer together, on their tokens of ``rows`` [tokens, hidden]; ``out``
        [tokens, hidden], float32.

        ``after``: the copy of the only expert, which may still be in progress. The caller keeps both tensors until
        :meth:`end`; otherwise the trunk might reuse their memory. Raises CopyFailed if the copy ``after`` failed,
        OutOfDeviceMemory if there is no room to compute; then any of the results may be missing.
        """
        ...

    def whole_layer(self, slots: Sequence[Slot], layout: SlotLayout, dtype: torch.dtype) -> Any:
        """The argument of :meth:`run_routes` for a layer whose experts are all on the device, in ``slots`` in their
        order; None if it cannot run them."""
        ...

    def run_routes(
        self, layer: Any, layout: SlotLayout, gate: FamilyGate, rows: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, LayerWork]:
        """Start to run ``rows`` [tokens, hidden] on their ``experts`` [tokens, k], which stay on the device, as work of
        the trunk.

        Returns float32 [tokens * k, hidden]. ``layer`` is from :meth:`whole_layer`. Not to be called between
        :meth:`begin` and :meth:`end`. Raises OutOfDeviceMemory.
        """
        ...

    def end(self) -> LayerWork:
        """Make the trunk's next work wait for all work since :meth:`begin`.

        A copy started between layers is waited for only by runs that are given its ticket.
        """
        ...

    def download(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Copies on the host, complete when this returns. Work of other queues is not waited for."""
        ...

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on ``torch_device``."""
        ...

    def synchronize(self) -> None:
        """Wait for all work."""
        ...
