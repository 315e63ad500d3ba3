"""Tables so large that a token's few rows are read where they lie, in one tensor or in several one below the other."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, damaged
from engine.models.formats.model_files import ModelFiles, StoredTensor

_NAME = re.compile(r"(?P<table>.+?)(?:\.shard_(?P<part>0|[1-9]\d{0,5}))?\.weight", re.ASCII)


_AT_RANDOM, _WANTED = 1, 3
"""MADV_RANDOM and MADV_WILLNEED of Linux and macOS."""
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class LookupTable:
    """A table [rows, width] that consists of ``parts`` of one format, one below the other.

    The system is told that rows are read in no order. Otherwise it reads megabytes around each of them. The pages of
    all rows that are wanted are announced before the first is read, so that the disk has many requests at once.
    """

    def __init__(self, parts: Sequence[StoredTensor]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *(part.shape[0] for part in parts)])
        for part in parts:
            _advise(_pages(part.words.ctypes.data, part.words.nbytes), _AT_RANDOM)

    @property
    def shape(self) -> tuple[int, int]:
        return int(self._starts[-1]), self._parts[0].shape[1]

    def rows_of(self, ids: NDArray[np.int64]) -> StoredTensor:
        """Copies of the rows ``ids`` [n], all of them rows of the table, in its format."""
        places = np.searchsorted(self._starts, ids, side="right") - 1
        first = self._parts[0].words
        words: NDArray[Any] = np.empty((len(ids), *first.shape[1:]), first.dtype)
        wanted = [(place, places == place) for place in np.unique(places)]
        for place, mine in wanted:
            stored = self._parts[place].words
            for row in np.unique(ids[mine] - self._starts[place]).tolist():
                _advise(_pages(stored.ctypes.data + row * stored.strides[0], stored.strides[0]), _WANTED)
        for place, mine in wanted:
            words[mine] = self._parts[place].words[ids[mine] - self._starts[place]]
        return StoredTensor(self._parts[0].dtype, words)


def _pages(address: int, nbytes: int) -> tuple[int, int]:
    """Address and bytes of the whole pages that hold ``nbytes`` from ``address`` on."""
    start = address - address % mmap.PAGESIZE
    return start, address + nbytes - start


def _advise(pages: tuple[int, int], advice: int) -> None:
    """Advise the system; where it does not take the advice, reading is slower and no more."""
    _libc.madvise(*pages, advice)


def lookup_tables(files: ModelFiles) -> dict[str, LookupTable]:
    """The tables of ``files`` by the names of their modules.

    Raises ModelError if parts are missing or do not fit together, or if a format has scales beside its rows.
    """
    stored: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in files.tables():
        match = _NAME.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            raise misplaced(name)
        if tensor.scales is not None:
            raise ModelError(
                f"Tensor {name} is stored as {tensor.dtype}, of which single rows are not read; take the model in "
                "bfloat16."
            )
        stored.setdefault(match["table"], {})[int(match["part"] or 0)] = tensor
    tables = {}
    for name, parts in stored.items():
        missing = next((part for part in range(len(parts)) if part not in parts), None)
        if missing is not None:
            raise damaged(f"Tensor {name}.shard_{missing}.weight is missing from the model's files")
        in_order = [parts[part] for part in range(len(parts))]
        if len({(part.dtype, part.shape[1]) for part in in_order}) > 1:
            raise damaged(f"The parts of {name} have several formats or widths")
        tables[name] = LookupTable(in_order)
    return tables


def misplaced(name: str) -> ModelError:
    """The error for a table ``name`` that the model has no place for."""
    return ModelError(
        f"Tensor {name} has no place in the model as config.json describes it; the files do not belong together: fetch "
        "the model again."
    )


def misshapen(name: str, shape: Sequence[int], wanted: Sequence[int]) -> ModelError:
    """The error for a table ``name`` of another ``shape`` than is ``wanted``."""
    return ModelError(
        f"Tensor {name} has shape {list(shape)}, but config.json asks for {list(wanted)}; the files do not belong "
        "together: fetch the model again."
    )
