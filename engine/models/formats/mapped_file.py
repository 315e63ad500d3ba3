"""Weight files mapped into this process: copy-on-write for reading, and shared for locking their pages."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, damaged
from engine.models.formats.model_files import StoredTensor
from engine.models.formats.number_formats import WIDTHS, is_grouped, is_packed, stored_bytes, words_dtype, words_shape


def aligned(words: NDArray[Any]) -> NDArray[Any]:
    """``words``, or a copy of them if they are not aligned, as after a header of odd length that old programs wrote.

    Reading a number at an unaligned address is undefined in C.
    """
    return words if words.flags.aligned else words.copy()


def _private_mapping_flags() -> int:
    """Flags of a private mapping that the kernel does not count as memory we might fill.

    Without them a writable private mapping that is larger than the machine's memory is refused. Python names the flag
    from 3.13 on.
    """
    flags = mmap.MAP_PRIVATE
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "arm64"):
        flags |= getattr(mmap, "MAP_NORESERVE", 0x4000)
    return flags


class MappedFile:
    """A file mapped copy-on-write. Reading it uses file-backed pages only, and nothing can change the file."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file cannot be opened or mapped, or is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size == 0:
                    raise damaged(f"{path.name} is damaged: it is empty")
                mapping = mmap.mmap(
                    file.fileno(),
                    status.st_size,
                    flags=_private_mapping_flags(),
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
        except OSError as error:
            raise ModelError(f"{path} cannot be mapped ({error.strerror or error}); check the file.") from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._identity = _identity(status)

    @property
    def size(self) -> int:
        return int(self._bytes.nbytes)

    @property
    def address(self) -> int:
        """Address of the mapping in this process's memory."""
        return int(self._bytes.ctypes.data)

    def tensor(self, dtype: str, shape: tuple[int, ...], start: int) -> StoredTensor:
        """The tensor of ``dtype`` and ``shape`` that begins ``start`` bytes into the file, as a view."""
        stop = start + stored_bytes(dtype, shape)
        if stop > self.size:
            raise ModelError(f"{self.path.name} is damaged: it has {self.size} bytes and should have {stop}.")
        return StoredTensor(dtype, self._bytes[start:stop].view(words_dtype(dtype)).reshape(words_shape(dtype, shape)))

    def strided(self, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> StoredTensor:
        """The tensor that begins ``start`` bytes into the file, with ``stride`` in elements.

        It is a view, or a copy where C could not read the words in place. Rows of packed blocks are contiguous. For a
        grouped format it contains the codes.
        """
        if is_grouped(dtype):
            rows, row = shape[0], words_shape(dtype, shape)[1]
            step = words_shape(dtype, (stride[0],))[0]
            codes = self.tensor("U8", ((rows - 1) * step + row,), start).words
            return StoredTensor(dtype, np.lib.stride_tricks.as_strided(codes, (rows, row), (step, 1)))
        if is_packed(dtype):
            return self.tensor(dtype, shape, start)
        width = WIDTHS[dtype]
        reach = sum((count - 1) * step for count, step in zip(shape, stride, strict=True)) + 1
        words = self.tensor(dtype, (reach,), start).words
        strides = tuple(step * width for step in stride)
        return StoredTensor(dtype, aligned(np.lib.stride_tricks.as_strided(words, shape, strides)))

    def check_unchanged(self) -> None:
        """Raises ModelError if the file at this path is no longer the one that was mapped, or was changed."""
        try:
            now = _identity(self.path.stat())
        except OSError as error:
            raise ModelError(f"{self.path} was removed while the model was open; load the model again.") from error
        if now != self._identity:
            raise ModelError(f"{self.path} was changed while the model was open; load the model again.")


class OwnMemory(MappedFile):
    """Memory of this process in the form of a mapped file, for what is not used as it is stored: zeros, which take no
    memory before something is written."""

    def __init__(self, name: str, nbytes: int) -> None:
        """Raises ModelError if the system does not give ``nbytes``, which are not 0."""
        flags = _private_mapping_flags() | mmap.MAP_ANONYMOUS
        try:
            mapping = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, OverflowError, ValueError, MemoryError) as error:
            raise ModelError(
                f"The system does not give {nbytes / 1e9:.1f} GB of memory for {name} ({error}); close other programs, "
                "or choose a smaller model.",
                kind="memory",
            ) from error
        self.path = Path(name)
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)

    def check_unchanged(self) -> None:
        """Nothing else can change it."""


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class SharedMapping:
    """A file mapped a second time, shared and read-only, so that its pages can be locked.

    Both mappings show the same pages of the system's cache, so it takes no memory. Locking the copy-on-write mapping
    instead would give every page a copy of its own.
    """

    def __init__(self, path: Path, nbytes: int = 0) -> None:
        """``nbytes`` 0: the whole file. Raises OSError if it cannot be opened, ValueError if it is empty."""
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        array: NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(array.ctypes.data)
        self.size = int(array.nbytes)

    def close(self) -> None:
        """Unmap the file. ``address`` must not be used afterwards."""
        self._mapping.close()
