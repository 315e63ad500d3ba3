"""The experts in the host's memory as a device copies them: runs of bytes of the mapped files, never a second copy.

A bank's expert is one run of bytes, a plain checkpoint's is one per matrix. What is stored transposed or interleaved is
copied as it lies and read with its strides, so the host never rearranges weights.

Copies are fastest from page-locked memory. The private mappings that the CPU reads cannot be locked: a lock for writing
gives every page a copy of its own. So each file is mapped a second time, shared and read-only, which takes no memory
(both show the same pages), and that mapping is locked.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.bank import BankExperts
from engine.models.files import Experts, ExpertWeights, FileMapping, StoredTensor, first_held
from engine.runtimes.torch.offload.devices import HostPiece, PartView, SlotLayout
from engine.system.free_memory import memory

ALIGNMENT = 64
LOCKED_SHARE = 0.8
"""Pages are locked only while they are at most so much of the memory that is available."""

_NAMES = ("gate_up", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True)
class _Run:
    """Adjacent bytes at ``address`` of this process, which belong at ``offset`` of the slot."""

    address: int
    nbytes: int
    offset: int


class HostExperts:
    """Where each expert's bytes are. ``layout`` is the same for all experts of the model."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self._pieces: dict[tuple[int, int], tuple[HostPiece, ...]] = {}
        self._locked: list[_LockedFile] = []
        self.layout, _ = self._place(*(first_held(experts) or (experts.layers[0], 0)))

    @property
    def slot_bytes(self) -> int:
        return self.layout.size

    def pieces(self, layer: int, expert: int) -> tuple[HostPiece, ...]:
        """The runs of bytes of one expert.

        Raises ModelError if the expert does not lie like the others, IndexError if there is none.
        """
        found = self._pieces.get((layer, expert))
        if found is None:
            layout, runs = self._place(layer, expert)
            if layout != self.layout:
                raise ModelError(
                    f"Expert {expert} of layer {layer} is stored in another way than the others; "
                    "`privatellm models prepare` writes them all alike."
                )
            found = tuple(HostPiece(run.offset, _bytes_at(self._source(run), run.nbytes)) for run in runs)
            self._pieces[layer, expert] = found
        return found

    def lock(
        self,
        register: Callable[[int, int], str | None],
        unregister: Callable[[int], None],
        progress: ProgressCallback,
        available: int | None = None,
    ) -> list[str]:
        """Lock the experts' pages with ``register(address, nbytes)``, which says why if it refuses.

        Returns a line for the person if they are not locked, or not all. ``available`` bytes of memory: as measured.
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

    def _source(self, run: _Run) -> int:
        """Where a run is to be read from: the locked mapping if its file is locked."""
        for locked in self._locked:
            if locked.private <= run.address < locked.private + locked.size:
                return locked.address + run.address - locked.private
        return run.address

    def _place(self, layer: int, expert: int) -> tuple[SlotLayout, list[_Run]]:
        weights = self.experts.expert(layer, expert)
        parts = _parts(weights)
        if isinstance(self.experts, BankExperts):
            slab = self.experts.slab(layer, expert)
            runs = [_Run(slab.words.ctypes.data, slab.nbytes, 0)]
        else:
            runs = _runs(parts.values())
        views = {name: _view(stored, runs) for name, stored in parts.items()}
        last = runs[-1]
        size = last.offset + last.nbytes
        return SlotLayout(size + -size % ALIGNMENT, weights.down.dtype, views), runs


class _LockedFile:
    """A second mapping of a file, shared and read-only."""

    def __init__(self, mapped: FileMapping, unregister: Callable[[int], None]) -> None:
        mapped.check_unchanged()
        with mapped.path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), mapped.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._array = np.frombuffer(self._mapping, dtype=np.uint8)
        self._unregister = unregister
        self.registered = False
        self.private = mapped.address
        self.address = int(self._array.ctypes.data)
        self.size = mapped.size

    def unlock(self) -> None:
        if self.registered:
            self.registered = False
            self._unregister(self.address)


def _parts(weights: ExpertWeights) -> dict[str, StoredTensor]:
    found = {name: getattr(weights, name) for name in _NAMES}
    return {name: stored for name, stored in found.items() if stored is not None}


def _span(stored: StoredTensor) -> tuple[int, int]:
    """The first byte of a tensor and the one after its last."""
    words = stored.words
    last = sum((count - 1) * stride for count, stride in zip(words.shape, words.strides, strict=True))
    return words.ctypes.data, words.ctypes.data + last + words.itemsize


def _runs(parts: Iterable[StoredTensor]) -> list[_Run]:
    """The bytes of all parts, overlapping ones (interleaved matrices) together, each run aligned in the slot.

    They are ordered as the parts are: files may hold the parts of two experts in different orders.
    """
    first = list(map(_span, parts))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(first):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    merged.sort(key=lambda span: next(place for place, (start, _) in enumerate(first) if span[0] <= start < span[1]))
    runs: list[_Run] = []
    offset = 0
    for start, stop in merged:
        runs.append(_Run(start, stop - start, offset))
        offset += stop - start + -(stop - start) % ALIGNMENT
    return runs


def _view(stored: StoredTensor, runs: list[_Run]) -> PartView:
    words = stored.words
    address = words.ctypes.data
    run = next(run for run in runs if run.address <= address < run.address + run.nbytes)
    stride = tuple(step // words.itemsize for step in words.strides)
    return PartView(run.offset + address - run.address, words.shape, stride)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over memory of this process, which the caller keeps alive."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
