"""The experts in the host's memory as a device copies them: spans of the mapped files, never a second copy.

An expert is one span of bytes per tensor: of a prepared model two, and one for each bias. What is stored transposed or
interleaved is copied as it lies and read with its strides, so the host never rearranges weights.

Copies are fastest from page-locked memory. The private mappings that the CPU reads cannot be locked: a lock for writing
gives every page a copy of its own. So each file is mapped a second time, shared and read-only, which takes no memory
(both show the same pages), and that mapping is locked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.formats.byte_map import FileMapping, FileSpan, MatrixPlace
from engine.models.formats.mapped_file import SharedMapping
from engine.models.formats.model_files import Experts
from engine.runtimes.torch.offload.devices import HostPiece, SlotLayout, SlotMatrix
from engine.system.free_memory import memory

ALIGNMENT = 64
LOCKED_SHARE = 0.8
"""Maximum share of the available memory whose pages are locked."""


class HostExperts:
    """The experts' bytes in host memory. The experts of a layer have one layout. A slot has room for any expert."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self._pieces: dict[tuple[int, int], tuple[HostPiece, ...]] = {}
        self._locked: list[_LockedFile] = []
        self._layouts = {layer: self._place(layer, _stands_for(experts, layer))[0] for layer in experts.layers}
        self.slot_bytes = max(layout.size for layout in self._layouts.values())

    def layout(self, layer: int) -> SlotLayout:
        """Layout of a slot with an expert of ``layer``."""
        return self._layouts[layer]

    def pieces(self, layer: int, expert: int) -> tuple[HostPiece, ...]:
        """The spans of one expert.

        Raises ModelError if its layout differs from the other experts of its layer, IndexError if there is no such
        expert.
        """
        pieces = self._pieces.get((layer, expert))
        if pieces is None:
            if expert not in self.experts.held(layer):
                raise IndexError(f"expert {expert} of layer {layer} is not here")
            layout, offsets, spans = self._place(layer, expert)
            if layout != self._layouts[layer]:
                raise ModelError(
                    f"Expert {expert} of layer {layer} is stored in another way than the others there; "
                    "`privatellm models prepare` writes them all alike."
                )
            pieces = tuple(
                HostPiece(offset, _bytes_at(self._source(span), span.nbytes))
                for offset, span in zip(offsets, spans, strict=True)
            )
            self._pieces[layer, expert] = pieces
        return pieces

    def lock(
        self,
        register: Callable[[int, int], str | None],
        unregister: Callable[[int], None],
        progress: ProgressCallback,
        available: int | None = None,
    ) -> list[str]:
        """Lock the experts' pages with ``register(address, nbytes)``, which returns the reason if it refuses.

        Returns a line for the person if not all pages are locked. ``available``: bytes of available memory; None:
        measured.
        """
        files: tuple[FileMapping, ...] = getattr(self.experts, "mapped_files", ())
        wanted = sum(mapped.size for mapped in files)
        room = memory().free if available is None else available
        if wanted > LOCKED_SHARE * room:
            return [
                f"The experts' {wanted / 1e9:.1f} GB are not page-locked, with {room / 1e9:.1f} GB of memory free: "
                "copies to the GPU are slower."
            ]
        done = 0
        for mapped in files:
            try:
                locked = _LockedFile(mapped, unregister)
                refusal = register(locked.address, mapped.size)
            except OSError as error:
                refusal = error.strerror or str(error)
            if refusal is not None:
                return [
                    f"Page-locking was refused for {(wanted - done) / 1e9:.1f} of {wanted / 1e9:.1f} GB of experts "
                    f"({refusal}): copies to the GPU are slower."
                ]
            locked.registered = True
            self._locked.append(locked)
            self._pieces.clear()
            done += mapped.size
            progress("page-locking the experts", done, wanted, "bytes")
        return []

    @property
    def locked_bytes(self) -> int:
        return sum(locked.size for locked in self._locked)

    def close(self) -> None:
        """Unlock the pages; no copy may be under way."""
        self._pieces.clear()
        for locked in self._locked:
            locked.unlock()
        self._locked.clear()

    def _source(self, span: FileSpan) -> int:
        """The address of a span: in the locked mapping if its file is locked."""
        for locked in self._locked:
            if locked.file is span.file:
                return locked.address + span.start
        return span.address

    def _place(self, layer: int, expert: int) -> tuple[SlotLayout, list[int], tuple[FileSpan, ...]]:
        """The slot's layout, and for each span of the expert its offset in the slot."""
        place = self.experts.place(layer, expert)
        offsets: list[int] = []
        size = 0
        for span in place.spans:
            offsets.append(size)
            size += span.nbytes + -span.nbytes % ALIGNMENT
        matrices = {name: _in_slot(matrix, offsets) for name, matrix in place.matrices.items()}
        return SlotLayout(size, matrices), offsets, place.spans


def _in_slot(matrix: MatrixPlace, offsets: Sequence[int]) -> SlotMatrix:
    """``matrix`` in a slot in which the expert's spans begin at ``offsets``."""
    groups = tuple(_in_slot(part, offsets) for part in (matrix.scales, matrix.biases) if part is not None)
    offset = offsets[matrix.span] + matrix.offset
    return SlotMatrix(matrix.format, offset, matrix.nbytes, matrix.shape, matrix.stride, groups)


def _stands_for(experts: Experts, layer: int) -> int:
    """A representative expert of ``layer``, one on this node if there is any."""
    return next(iter(experts.held(layer)), 0)


class _LockedFile:
    """A file's shared mapping, whose pages a device has registered."""

    def __init__(self, mapped: FileMapping, unregister: Callable[[int], None]) -> None:
        mapped.check_unchanged()
        self._mapping = SharedMapping(mapped.path, mapped.size)
        self._unregister = unregister
        self.registered = False
        self.file = mapped
        self.address = self._mapping.address
        self.size = mapped.size

    def unlock(self) -> None:
        if self.registered:
            self.registered = False
            self._unregister(self.address)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over memory of this process, which the caller keeps alive."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
