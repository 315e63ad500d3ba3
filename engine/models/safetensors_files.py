"""Reading and writing safetensors files: the header, and tensors as views of a copy-on-write file mapping.

The format: 8 bytes little-endian length, that many bytes of JSON (name -> dtype, shape, offsets), then the tensors
without gaps. Our own reader, because the library's hands out copies or torch tensors where we need raw words of any
dtype, and because a damaged file must end in one sentence.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.files import StoredTensor
from engine.models.wording import shown

HEADER_LIMIT = 100_000_000
"""Largest header in bytes, as the safetensors library has it."""

ALIGNMENT = 64
"""Where the data of files we write begins, and each tensor in them if its neighbours' sizes permit."""

WIDTHS: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element of the dtypes that are read."""

_WORDS: dict[int, np.dtype[Any]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_MAX_DIMENSIONS = 16
_LONGEST_NAME = 500


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file: bytes ``start`` to ``stop``, counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def words_dtype(dtype: str) -> np.dtype[Any]:
    """numpy's unsigned integer as wide as ``dtype``."""
    return _WORDS[WIDTHS[dtype]]


def aligned(words: NDArray[Any]) -> NDArray[Any]:
    """``words`` where C may read them one by one: as they lie, or a copy if a file's header has an odd length, as old
    programs wrote it. Reading a number at an address that is no multiple of its width is undefined there."""
    return words if words.flags.aligned else words.copy()


# --- the header ---------------------------------------------------------------------------------------------------


def parse_header(header: bytes, file_size: int, name: str) -> dict[str, TensorEntry]:
    """The tensors that ``header`` (the JSON only) describes in a file of ``file_size`` bytes, in order of position.

    Raises ModelError naming the file (``name``) and what is wrong with it: nothing else, whatever the bytes are.
    """
    try:
        table = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise _damaged(name, "its header is nested too deeply") from None
    except ValueError as error:
        raise _damaged(name, f"its header is not JSON ({shown(error)})") from None
    if not isinstance(table, dict):
        raise _damaged(name, "its header is not a table")
    table.pop("__metadata__", None)
    base = 8 + len(header)
    entries = {key: _entry(name, key, value, base) for key, value in table.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    position = base
    for key, entry in ordered:
        if entry.start != position:
            raise _damaged(name, f"tensor {shown(key)} does not begin where the one before it ends")
        position = entry.stop
    if position > file_size:
        raise _damaged(name, f"it is cut off: it has {file_size} bytes and should have {position}")
    if position < file_size:
        raise _damaged(name, f"it has {file_size} bytes and its tensors end after {position}")
    return dict(ordered)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the file at ``path``. Raises ModelError if it cannot be read or is damaged."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise _damaged(path.name, f"it is cut off or is not a safetensors file ({size} bytes)")
            if length > HEADER_LIMIT:
                raise _damaged(path.name, f"its header of {length} bytes is over the limit of {HEADER_LIMIT}")
            header = file.read(length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); check the file.") from error
    return parse_header(header, size, path.name)


def _entry(name: str, key: str, value: Any, base: int) -> TensorEntry:
    if not key.isprintable() or len(key) > _LONGEST_NAME:
        raise _damaged(name, f"a tensor has the impossible name {shown(key)}")
    if not isinstance(value, dict):
        raise _damaged(name, f"the entry of tensor {shown(key)} is not a table")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise _damaged(name, f"tensor {shown(key)} has the unknown type {shown(dtype)}")
    if not _whole_numbers(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _damaged(name, f"tensor {shown(key)} has the impossible shape {shown(shape)}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(name, f"tensor {shown(key)} has the impossible offsets {shown(offsets)}")
    if math.prod(shape) * WIDTHS[dtype] != offsets[1] - offsets[0]:
        raise _damaged(name, f"tensor {shown(key)} of shape {shown(shape)} and type {dtype} does not fill its bytes")
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name is there twice")
    return table


def _damaged(name: str, what: str) -> ModelError:
    return ModelError(f"{name} is damaged: {what}; fetch the model again.")


# --- mapping ------------------------------------------------------------------------------------------------------


def _private_mapping_flags() -> int:
    """Flags of a private mapping that the kernel does not count as memory we might fill.

    A writable private mapping larger than the machine's memory is refused otherwise, and that is just what a large
    model's file is. Python names the flag from 3.13 on.
    """
    flags = mmap.MAP_PRIVATE
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "arm64"):
        flags |= getattr(mmap, "MAP_NORESERVE", 0x4000)
    return flags


class MappedFile:
    """A file mapped copy-on-write: reading it costs file-backed pages only, and nothing can change the file."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file cannot be opened or mapped, or is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size == 0:
                    raise ModelError(f"{path.name} is damaged: it is empty; fetch the model again.")
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
        """Where the mapping begins in this process's memory."""
        return int(self._bytes.ctypes.data)

    def tensor(self, dtype: str, shape: tuple[int, ...], start: int) -> StoredTensor:
        """The tensor of ``dtype`` and ``shape`` that begins ``start`` bytes into the file, as a view."""
        stop = start + math.prod(shape) * WIDTHS[dtype]
        if stop > self.size:
            raise ModelError(f"{self.path.name} is damaged: it has {self.size} bytes and should have {stop}.")
        return StoredTensor(dtype, self._bytes[start:stop].view(words_dtype(dtype)).reshape(shape))

    def check_unchanged(self) -> None:
        """Raises ModelError if the file at this path is no longer the one that was mapped, or was changed."""
        try:
            now = _identity(self.path.stat())
        except OSError as error:
            raise ModelError(f"{self.path} was removed while the model was open; load the model again.") from error
        if now != self._identity:
            raise ModelError(f"{self.path} was changed while the model was open; load the model again.")


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


# --- writing ------------------------------------------------------------------------------------------------------


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON of a file that holds ``tensors`` (name, dtype, shape) in this order; the data begins aligned."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        stop = position + math.prod(shape) * WIDTHS[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    body = json.dumps(table, separators=(",", ":")).encode("utf-8")
    body += b" " * (-(8 + len(body)) % ALIGNMENT)
    return len(body).to_bytes(8, "little") + body
