"""Reads a GGUF file: its metadata, and its tensors as float32 rows.

The header is parsed here because the ``gguf`` package's reader trusts every length (a damaged count makes it loop
forever) and takes seconds for a large vocabulary. The package is used for dequantizing.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.wording import shown

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_ENTRIES_LIMIT = 1 << 20
"""Maximum metadata keys and tensors, more than any real model has."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the file: ``rows`` rows of ``columns`` values, ``row_bytes`` bytes per row, quantised as ``type``."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as numpy and torch have it."""
    type: int
    offset: int
    """Bytes from the beginning of the file."""
    rows: int
    columns: int
    row_bytes: int


class GgufFile:
    """An open GGUF file, memory-mapped; use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is not GGUF, is damaged, or ends too early."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}.", "bad-input") from error
        try:
            self.metadata, self.tensors = _read_header(self._map)
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            self._map.close()
            raise ModelError(
                f"{path} is not a usable GGUF file: {shown(str(error), 200)}; download it again."
            ) from error

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is still alive: the mapping goes with it
            self._map.close()

    def rows(
        self, name: str, order: NDArray[np.int64] | None = None, block_bytes: int = 32 << 20
    ) -> Iterator[NDArray[np.float32]]:
        """The tensor's rows as float32 [n, columns], block by block; with ``order``, row ``order[i]`` comes i-th.

        At most about ``block_bytes`` of float32 at a time. Raises ModelError for a quantisation that is not known.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.rows * tensor.row_bytes, tensor.offset)
        raw = raw.reshape(tensor.rows, tensor.row_bytes)
        step = max(1, block_bytes // (4 * tensor.columns))
        for start in range(0, tensor.rows, step):
            block = raw[start : start + step] if order is None else raw[order[start : start + step]]
            try:
                values = dequantize(np.ascontiguousarray(block), GGMLQuantizationType(tensor.type))
            except NotImplementedError as error:
                kind = GGMLQuantizationType(tensor.type).name
                raise ModelError(
                    f"{self.path}: tensor {name} is quantised as {kind}, which cannot be read here; use a Q4_K, Q5_K, "
                    f"Q6_K, Q8_0, F16 or BF16 file of this model."
                ) from error
            yield values.astype(np.float32, copy=False).reshape(-1, tensor.columns)

    def floats(self, name: str) -> NDArray[np.float32]:
        """The whole tensor as float32 in its own shape (for small ones)."""
        return np.concatenate(list(self.rows(name))).reshape(self.tensors[name].shape)


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise ValueError("it ends in the middle of its header")
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, form: str) -> Any:
        layout = struct.Struct("<" + form)
        return layout.unpack(self.take(layout.size))[0]

    def string(self) -> str:
        return self.take(self.unpack("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.unpack("I"), self.unpack("Q")
            if item == _STRING:
                if count > (self.size - self.at) // 8:
                    raise ValueError("it ends in the middle of its header")
                return [self.string() for _ in range(count)]
            if item in _SCALARS:
                layout = np.dtype(_SCALARS[item]).newbyteorder("<")
                return np.frombuffer(self.take(count * layout.itemsize), layout).tolist()
            raise ValueError(f"an array of type {item} is not known")
        raise ValueError(f"a value of type {kind} is not known")


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(data)
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.unpack("I")
    if version not in {2, 3}:
        raise ValueError(f"its version {version} is not 2 or 3 (or it is big-endian)")
    tensor_count, value_count = cursor.unpack("Q"), cursor.unpack("Q")
    if max(tensor_count, value_count) > _ENTRIES_LIMIT:
        raise ValueError(f"it claims {tensor_count} tensors and {value_count} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"metadata {key!r} is there twice")
        metadata[key] = cursor.value(cursor.unpack("I"))
    infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment {alignment!r} is not a power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ValueError(f"tensor {name!r} is there twice")
        tensors[name] = _placed(name, shape, kind, start + offset, cursor.size)
    return metadata, tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.unpack("I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.unpack("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.unpack("I"), cursor.unpack("Q")


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ValueError(f"tensor {name!r} has the unknown type {kind}") from None
    columns, rows = shape[-1], math.prod(shape[:-1])
    if columns < 1 or rows < 1 or columns % block:
        raise ValueError(f"tensor {name!r} has the impossible shape {list(shape)}")
    row_bytes = columns // block * block_bytes
    if offset + rows * row_bytes > size:
        missing = offset + rows * row_bytes - size
        raise ValueError(f"it is truncated: tensor {name!r} ends {missing} bytes after the file does")
    return GgufTensor(name, shape, kind, offset, rows, columns, row_bytes)
