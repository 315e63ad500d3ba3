"""Reading and writing the headers of safetensors files.

The format: 8 bytes little-endian length, that many bytes of JSON (name -> dtype, shape, offsets), then the tensors
without gaps. The reader is our own: the library's gives copies or torch tensors where raw words of any dtype are
needed, and a damaged file must end in one sentence.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from engine.errors import ModelError, damaged, shown
from engine.models.formats.number_formats import WIDTHS

if TYPE_CHECKING:
    from engine.models.formats.repacking import Repacking, ScaleTable, WidenedPowers

HEADER_LIMIT = 100_000_000
"""Largest header in bytes, as the safetensors library has it."""

ALIGNMENT = 64
"""Alignment in bytes of the data of written files, and of each tensor in them if its neighbours' sizes permit."""

_MAX_DIMENSIONS = 16
_LONGEST_NAME = 500


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in its file: bytes ``start`` to ``stop``, counted from the beginning of the file.

    ``groups`` are the scales, and then the biases, of a grouped number format: the files' names and where they lie.
    ``step``: bytes from one expert to the next in a tensor with those of a layer, if others lie between them; else 0.
    ``made``: how what does not lie in a file is computed when the model is loaded.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    groups: tuple[tuple[str, TensorEntry], ...] = ()
    step: int = 0
    made: Repacking | ScaleTable | WidenedPowers | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, its scales and its biases."""
        return self.stop - self.start + sum(entry.nbytes for _, entry in self.groups)


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
    return damaged(f"{name} is damaged: {what}")


# --- writing ------------------------------------------------------------------------------------------------------


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], alignment: int = ALIGNMENT
) -> bytes:
    """Length and JSON of a file that holds ``tensors`` (name, dtype, shape) in this order. The data begins at a
    multiple of ``alignment`` bytes."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        stop = position + math.prod(shape) * WIDTHS[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    body = json.dumps(table, separators=(",", ":")).encode("utf-8")
    body += b" " * (-(8 + len(body)) % alignment)
    return len(body).to_bytes(8, "little") + body
