"""Weights in mapped files: the pages that this node uses, whether they are in memory, touching and locking them.

The files are mapped a second time, shared and read-only. All mappings show the same pages of the system's cache, so
pages locked here stay in memory for the runtime. (Locking the runtime's own mapping, which is copy-on-write, would copy
the pages.) Pages are touched in the runtime's mapping, if it has one, because the first access through a mapping faults
even if the page is in memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import ModelError
from engine.models.architectures.families import FAMILIES, is_table
from engine.models.architectures.quantisation import schemes
from engine.models.folders.opening import open_model
from engine.models.folders.shard_files import part_of
from engine.models.folders.weight_layout import WeightLayout, layout_of, runs_of
from engine.models.formats.byte_map import FileMapping, Run, Runs, merged, without
from engine.models.formats.mapped_file import SharedMapping
from engine.planning.residency import lockable

PIECE_BYTES = 8 * 1024 * 1024
"""Size in bytes of a piece that is touched at once. An answer may begin between two pieces."""
_PAGE = mmap.PAGESIZE
_POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ (5.14), which Python does not name: all pages at once, without a fault for each."""


@dataclass(frozen=True)
class Locked:
    """The result of locking: the locked and the wanted bytes, and why not more was locked."""

    nbytes: int
    wanted: int
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.nbytes / 1e9:.1f} of {self.wanted / 1e9:.1f} GB of weights are locked in memory"
        return f"{text} ({self.reason})" if self.reason else text


class MappedWeights:
    """The trunk and the held experts of a model folder, in the order in which a pass uses them. Tables are read where
    they lie and are not among them."""

    own_memory = False

    def __init__(
        self,
        folder: Path,
        held: Mapping[int, Sequence[int]] | None = None,
        trunk: bool = True,
        in_use: Iterable[FileMapping] = (),
        last: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        """``held``: the experts in use, by layer; None: all that are here. ``trunk``: whether the trunk is in use.

        ``in_use``: the runtime's own mappings, which must stay mapped until this is closed. ``last``: experts, by
        layer, that are needed least and come after all others; they are left out if memory does not suffice. Raises
        ModelError.
        """
        layout = layout_of(folder)
        shard = part_of(folder)
        # Touching a hole of a shard would fill memory with zeros.
        pieces = layout.trunk if trunk and (shard is None or shard.has_trunk) else ()
        family = FAMILIES.get(str(layout.config.get("model_type")))
        runs: list[Run] = [
            run for piece in pieces for run in runs_of(part for part in piece if not is_table(family, part[0]))
        ]
        later: list[Run] = []
        for layer in layout.layers:
            here: Sequence[int] = range(layout.count) if shard is None else shard.held(layer)
            mine = here if held is None else [expert for expert in held.get(layer, ()) if expert in here]
            late = () if last is None else last.get(layer, ())
            runs += merged(run for expert in mine if expert not in late for run in layout.experts[layer, expert])
            later += merged(run for expert in mine if expert in late for run in layout.experts[layer, expert])
        runs += later
        spent = _spent(layout)
        self.computed_bytes = sum(run.nbytes for run in runs)
        """Bytes of the weights of which the runtime reads what was computed when the model was loaded."""
        runs = without(runs, spent)
        self.computed_bytes -= sum(run.nbytes for run in runs)
        self._files = [_mapping(folder / name) for name, _ in layout.files]
        theirs = {mapping.path.resolve(): mapping for mapping in in_use}
        self._touched = [
            theirs.get((folder / name).resolve(), own) for own, (name, _) in zip(self._files, layout.files, strict=True)
        ]
        self._pieces = [piece for run in runs for piece in _cut(run)]
        self._locked: list[tuple[int, int]] = []

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece."""
        return [piece.nbytes for piece in self._pieces]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def touch(self, index: int) -> None:
        """Bring every page of a piece into memory, and into the mapping."""
        piece = self._pieces[index]
        begin = self._touched[piece.file].address
        first = piece.start - piece.start % _PAGE
        # Any other error than an unknown advice means that the file became shorter or the disk fails. Reading would
        # then end the process.
        if sys.platform == "linux" and (
            not _libc.madvise(begin + first, piece.stop - first, _POPULATE_READ) or ctypes.get_errno() != errno.EINVAL
        ):
            return
        view = np.ctypeslib.as_array((ctypes.c_uint8 * piece.nbytes).from_address(begin + piece.start))
        int(view[::_PAGE].max())
        int(view[-1])

    def resident(self, index: int) -> bool:
        """Whether every page of a piece is in memory."""
        present, pages = self._present(index)
        return present == pages

    def lock(self, available: int) -> Locked:
        """Lock pages in memory, in order, as far as the system allows and ``available`` bytes of memory suggest."""
        wanted = self.nbytes
        allowed = _allowed_to_lock()
        room = lockable(wanted, allowed, available)
        reason = "" if room == wanted else _why_less(allowed, available)
        done = 0
        for piece in self._pieces:
            if done + piece.nbytes > room:
                break
            problem = self._lock(piece)
            if problem is not None:
                reason = problem
                break
            done += piece.nbytes
        return Locked(done, wanted, reason if done < wanted else "")

    def close(self) -> None:
        """Unlock and unmap everything."""
        for address, nbytes in self._locked:
            _libc.munlock(address, nbytes)
        self._locked.clear()
        self._pieces.clear()
        self._touched.clear()
        for mapping in self._files:
            mapping.close()
        self._files.clear()

    def _lock(self, piece: Run) -> str | None:
        address, nbytes = self._pages(piece)
        if _libc.mlock(address, nbytes):
            code = ctypes.get_errno()
            return "the system refused more" if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN) else os.strerror(code)
        self._locked.append((address, nbytes))
        return None

    def _present(self, index: int) -> tuple[int, int]:
        """The number of a piece's pages that are in memory, and the number of all its pages."""
        address, nbytes = self._pages(self._pieces[index])
        pages = -(-nbytes // _PAGE)
        states = np.zeros(pages, dtype=np.uint8)
        if _libc.mincore(address, nbytes, states.ctypes.data):
            return 0, pages
        return int((states & 1).sum()), pages

    def _pages(self, piece: Run) -> tuple[int, int]:
        """Address and bytes of the whole pages that hold a piece."""
        start = piece.start - piece.start % _PAGE
        return self._files[piece.file].address + start, piece.stop - start


def _spent(layout: WeightLayout) -> Runs:
    """The bytes of the layout's files that are read only while the model is loaded."""
    if not schemes(layout.config):
        return ()
    numbers = {name: number for number, (name, _) in enumerate(layout.files)}
    spent = open_model(layout.folder, as_whole=True).spent()
    return merged(Run(numbers[file], entry.start, entry.stop) for file, entry in spent)


def _mapping(path: Path) -> SharedMapping:
    try:
        return SharedMapping(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be mapped ({error}); check the file.") from error


def _cut(run: Run) -> list[Run]:
    starts = range(run.start, run.stop, PIECE_BYTES)
    return [Run(run.file, start, min(run.stop, start + PIECE_BYTES)) for start in starts]


def _allowed_to_lock() -> int | None:
    """Bytes this process may lock; None: no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def _why_less(allowed: int | None, available: int) -> str:
    if allowed is not None and allowed < available:
        return f"this process may lock {allowed / 1e6:.1f} MB; `ulimit -l` raises that"
    return f"{available / 1e9:.1f} GB of memory are free"


_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("mlock", "munlock"):
    getattr(_libc, _name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
