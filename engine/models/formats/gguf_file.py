"""Reads a GGUF file, whole or split: its metadata, where its tensors lie, and their rows as float32.

The header is parsed here because the ``gguf`` package's reader trusts every length (a damaged count makes it loop
forever) and takes seconds for a large vocabulary. The package is used for dequantizing. Nothing is mapped, as a mapped
file that another program shortens ends the process that reads it.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, shown
from engine.models.formats.gguf_names import missing_part, parts_of
from engine.models.formats.number_formats import GGML_TYPES, block_size

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_FLOAT32 = 6
_VERSIONS = (2, 3)
_PEEK_BYTES = 1 << 16
_PEEK_ENTRIES = 100
"""Maximum metadata keys that are read for the architecture, which is usually the first."""
_ENTRIES_LIMIT = 1 << 20
"""Maximum metadata keys and tensors, more than any real model has."""
MOST_HEADER_BYTES = 256 << 20
"""Maximum bytes of a header; a vocabulary of 260,000 tokens takes about 16 million."""
_MOST_ITEMS = 1 << 23
"""Maximum items of all arrays of a header; a vocabulary of 260,000 tokens takes about 1.3 million."""
_SHOWN_BYTES = 40
"""Bytes of a text that are shown where it is no UTF-8."""
_FIRST_READ = 1 << 20
"""Bytes of a header that are read first; then as many again each time."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the file: ``rows`` rows of ``columns`` values, ``row_bytes`` bytes per row."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as numpy and torch have it."""
    format: str
    """ggml's name of the number format."""
    offset: int
    """Bytes from the beginning of the file."""
    rows: int
    columns: int
    row_bytes: int
    part: int = 0
    """Number of the file of a split model that holds it, from 0."""

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def stated_architecture(path: Path) -> str:
    """What the file calls its architecture, from its first bytes; empty if these do not tell."""
    try:
        with path.open("rb") as file:
            data = file.read(_PEEK_BYTES)
        cursor = _Cursor(data, 0, len(data))
        if cursor.take(4) != _MAGIC or cursor.unpack("I") not in _VERSIONS:
            return ""
        cursor.unpack("Q")
        for _ in range(min(cursor.unpack("Q"), _PEEK_ENTRIES)):
            key, value = cursor.string(), cursor.value(cursor.unpack("I"))
            if key == "general.architecture":
                return value if isinstance(value, str) else ""
    except (OSError, ValueError, struct.error, OverflowError):
        pass
    return ""


class UnreadableFormat(ModelError):
    """A tensor is stored in a number format that cannot be run. ``problem`` says so; other files may be without it."""

    def __init__(self, path: Path, tensor: str, number_format: str) -> None:
        self.problem = f"{path}: tensor {shown(tensor)} is stored as {number_format}, which cannot be run"
        formats = ", ".join(GGML_TYPES.values())
        super().__init__(
            f"{self.problem}; use a Q4_K_M, Q5_K_M, Q6_K or Q8_0 file of this model (formats that run: {formats})."
        )


class _UnknownType(Exception):
    """The type of a tensor is a number that ggml does not use. The arguments are its name and what to call the type."""


class HeaderGoesOn(ValueError):
    """The header of file ``part`` of the model, counted from 0, does not end within the bytes that were given."""

    def __init__(self, part: int) -> None:
        super().__init__("its header goes on")
        self.part = part


class GgufFile:
    """An open GGUF model; use as a context manager."""

    def __init__(self, path: Path, beginnings: Sequence[tuple[bytes, int]] = ()) -> None:
        """``path``: the file, or any part of a split one. ``beginnings``: the first bytes of each file and its size,
        instead of the files; the tensors are known then, and cannot be read.

        Raises ModelError if a file is missing, is not GGUF, is damaged, or ends too early; HeaderGoesOn for too short a
        beginning.
        """
        self.path = path
        self.paths = parts_of(path)
        self._files: list[BinaryIO] = []
        self._sizes: list[int] = []
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.lists: dict[str, GgufTensor] = {}
        """Lists of float32 in the metadata, by their keys, as if they were tensors."""
        try:
            for part in range(len(self.paths)):
                if beginnings:
                    self._add(part, *beginnings[part])
                else:
                    self._add(part, b"", self._open(part))
            self._check_whole()
        except ModelError:
            self.close()
            raise

    @property
    def data_starts(self) -> tuple[int, ...]:
        """Bytes of each file before its first tensor; the whole file's if it holds none."""
        starts = list(self._sizes)
        for tensor in self.tensors.values():
            starts[tensor.part] = min(starts[tensor.part], tensor.offset)
        return tuple(starts)

    def _open(self, part: int) -> int:
        """Bytes of the file, which is opened for reading."""
        path = self.paths[part]
        if len(self.paths) > 1 and not path.exists():
            raise ModelError(missing_part(path, len(self.paths)), "bad-input")
        try:
            self._files.append(path.open("rb"))
            return os.fstat(self._files[-1].fileno()).st_size
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}.", "bad-input") from error

    def _add(self, part: int, data: bytes, size: int) -> None:
        path = self.paths[part]
        self._sizes.append(size)
        try:
            metadata, lists, tensors = _read_header(
                _Cursor(data, part, size, self._files[part] if self._files else None)
            )
        except HeaderGoesOn:
            raise
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.", "disk") from error
        except _UnknownType as unknown:
            raise UnreadableFormat(path, *unknown.args) from unknown
        except (struct.error, ValueError, OverflowError) as error:
            raise ModelError(
                f"{path} is not a usable GGUF file: {shown(str(error), 200)}; download it again."
            ) from error
        twice = next((name for name in tensors if name in self.tensors), None)
        if twice is not None:
            raise ModelError(f"{path} holds the tensor {shown(twice)}, as another part does; download it again.")
        if len(self.paths) > 1 and metadata.get("split.no", part) != part:
            raise ModelError(
                f"{path} is part {shown(metadata['split.no'])} of its model, not {part} (counted from 0); download it "
                "again."
            )
        self.tensors |= tensors
        if part == 0:
            self.metadata, self.lists = metadata, lists

    def _check_whole(self) -> None:
        count = self.metadata.get("split.count", 1)
        if count not in (0, len(self.paths)):
            raise ModelError(
                f"{self.path} is one of {shown(count)} parts of a split model; name the first, which ends in "
                "-00001-of-... as it was published, with the others beside it.",
                "bad-input",
            )
        stated = self.metadata.get("split.tensors.count", len(self.tensors))
        if stated != len(self.tensors):
            raise ModelError(
                f"{self.path} and its parts hold {len(self.tensors)} tensors instead of {shown(stated)}; download them "
                "again."
            )

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def rows(
        self, name: str, order: NDArray[np.int64] | None = None, block_bytes: int = 32 << 20
    ) -> Iterator[NDArray[np.float32]]:
        """The tensor's rows as float32 [n, columns], block by block; with ``order``, row ``order[i]`` comes i-th.

        At most about ``block_bytes`` of float32 at a time. Raises ModelError for a quantisation that is not known.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        whole = None if order is None else self._stored_rows(tensor, 0, tensor.rows)
        step = max(1, block_bytes // (4 * tensor.columns))
        for start in range(0, tensor.rows, step):
            if whole is None or order is None:
                block = self._stored_rows(tensor, start, min(step, tensor.rows - start))
            else:
                block = whole[order[start : start + step]]
            try:
                values = dequantize(block, GGMLQuantizationType[tensor.format])
            except NotImplementedError as error:
                raise UnreadableFormat(self.path, name, tensor.format) from error
            yield values.astype(np.float32, copy=False).reshape(-1, tensor.columns)

    def _stored_rows(self, tensor: GgufTensor, first: int, count: int) -> NDArray[np.uint8]:
        """Rows as they are stored, bytes [count, row_bytes]."""
        file, nbytes = self._files[tensor.part], count * tensor.row_bytes
        try:
            file.seek(tensor.offset + first * tensor.row_bytes)
            data = file.read(nbytes)
        except OSError as error:
            raise ModelError(f"{self.paths[tensor.part]} cannot be read: {error.strerror or error}.", "disk") from error
        if len(data) < nbytes:
            raise ModelError(f"{self.paths[tensor.part]} was shortened while it was read; download it again.")
        return np.frombuffer(data, np.uint8).reshape(count, tensor.row_bytes)

    def floats(self, name: str) -> NDArray[np.float32]:
        """The whole tensor as float32 in its own shape (for small ones)."""
        return np.concatenate(list(self.rows(name))).reshape(self.tensors[name].shape)


class _Cursor:
    """Reads the header of a file of ``size`` bytes, which is part ``part`` of its model: ``data``, its first bytes, and
    what follows from ``file``, if that is given."""

    def __init__(self, data: bytes, part: int, size: int, file: BinaryIO | None = None) -> None:
        self.data = data
        self.part = part
        self.size = size
        self.file = file
        self.at = 0
        self.items = 0
        self.item = -1
        """The type of what the latest list holds."""

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            self._read_on(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def _read_on(self, count: int) -> None:
        if count > self.size - self.at:
            raise ValueError("it ends in the middle of its header")
        if self.at + count > MOST_HEADER_BYTES:
            raise ValueError(f"its header claims over {MOST_HEADER_BYTES} bytes, which no model needs")
        if self.file is None:
            raise HeaderGoesOn(self.part)
        wanted = self.at + count - len(self.data)
        self.data += self.file.read(max(wanted, len(self.data), _FIRST_READ))
        if count > len(self.data) - self.at:
            raise ValueError("it was shortened while it was read")

    def count_items(self, count: int) -> None:
        """Raises ValueError if the arrays have more items than any real model's."""
        self.items += count
        if self.items > _MOST_ITEMS:
            raise ValueError(f"its header claims lists of {self.items} items, which no model needs")

    def unpack(self, form: str) -> Any:
        layout = struct.Struct("<" + form)
        return layout.unpack(self.take(layout.size))[0]

    def string(self) -> str:
        text = self.take(self.unpack("Q"))
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"its text {text[:_SHOWN_BYTES]!r} is no UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            self.item = item = self.unpack("I")
            count = self.unpack("Q")
            if count > self.size - self.at:
                raise ValueError("it ends in the middle of its header")
            self.count_items(count)
            if item == _STRING:
                return [self.string() for _ in range(count)]
            if item in _SCALARS:
                layout = np.dtype(_SCALARS[item]).newbyteorder("<")
                return np.frombuffer(self.take(count * layout.itemsize), layout).tolist()
            raise ValueError(f"an array of type {item} is not known")
        raise ValueError(f"a value of type {kind} is not known")


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor], dict[str, GgufTensor]]:
    """The metadata, its lists of float32, and the tensors."""
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.unpack("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version {version} is not 2 or 3 (or it is big-endian)")
    tensor_count, value_count = cursor.unpack("Q"), cursor.unpack("Q")
    if max(tensor_count, value_count) > _ENTRIES_LIMIT:
        raise ValueError(f"it claims {tensor_count} tensors and {value_count} metadata entries")
    metadata: dict[str, Any] = {}
    lists: dict[str, GgufTensor] = {}
    for _ in range(value_count):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"metadata {key!r} is there twice")
        kind = cursor.unpack("I")
        metadata[key] = value = cursor.value(kind)
        if kind == _ARRAY and value and cursor.item == _FLOAT32:
            nbytes = 4 * len(value)
            lists[key] = GgufTensor(key, (len(value),), "F32", cursor.at - nbytes, 1, len(value), nbytes, cursor.part)
    infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment {alignment!r} is not a power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ValueError(f"tensor {name!r} is there twice")
        tensors[name] = _placed(name, shape, kind, start + offset, cursor.size, cursor.part)
    _check_apart(tensors)
    return metadata, lists, tensors


def _check_apart(tensors: dict[str, GgufTensor]) -> None:
    """Raises ValueError if two tensors share bytes."""
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise ValueError(f"the tensors {before.name!r} and {after.name!r} overlap")


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.unpack("I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.unpack("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.unpack("I"), cursor.unpack("Q")


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int, size: int, part: int) -> GgufTensor:
    try:
        number_format, block, block_bytes = _format_of(kind)
    except (ValueError, KeyError):
        raise _UnknownType(name, f"the unknown type {kind}") from None
    columns, rows = shape[-1], math.prod(shape[:-1])
    if columns < 1 or rows < 1 or columns % block:
        raise ValueError(f"tensor {name!r} has the impossible shape {list(shape)}")
    row_bytes = columns // block * block_bytes
    if offset + rows * row_bytes > size:
        missing = offset + rows * row_bytes - size
        raise ValueError(f"it is truncated: tensor {name!r} ends {missing} bytes after the file does")
    return GgufTensor(name, shape, number_format, offset, rows, columns, row_bytes, part)


def _format_of(kind: int) -> tuple[str, int, int]:
    """ggml's name of the type with the number ``kind``, and the numbers and bytes of one of its blocks.

    Raises ValueError or KeyError for a number that ggml does not use.
    """
    if kind in GGML_TYPES:
        name = GGML_TYPES[kind]
        return (name, *block_size(name))
    # The package takes as long to import as the rest of opening a file does, and only names what cannot be run.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return (GGMLQuantizationType(kind).name, *GGML_QUANT_SIZES[GGMLQuantizationType(kind)])
