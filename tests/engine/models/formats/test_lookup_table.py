"""Tables of which few rows are read, in one tensor or in several."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.errors import ModelError
from engine.models.formats.lookup_table import LookupTable, lookup_tables
from engine.models.formats.mapped_file import MappedFile
from engine.models.formats.model_files import ModelFiles, StoredTensor
from engine.system.durable_files import forget_cached

NUMBERS = np.arange(7 * 3, dtype=np.uint32).reshape(7, 3)


class Files:
    """A model's files that have these tables."""

    def __init__(self, tables: dict[str, StoredTensor]) -> None:
        self._tables = tables

    def tables(self) -> Iterator[tuple[str, StoredTensor]]:
        return iter(self._tables.items())


def tables_in(**tables: StoredTensor) -> dict[str, LookupTable]:
    named: Any = Files({name.replace("__", "."): tensor for name, tensor in tables.items()})
    return lookup_tables(cast(ModelFiles, named))


def stored(numbers: Any, dtype: str = "F32") -> StoredTensor:
    return StoredTensor(dtype, numbers)


@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 6)])
def test_rows_are_those_of_the_whole_table(cuts: tuple[int, ...]) -> None:
    table = LookupTable([stored(part) for part in np.split(NUMBERS, cuts)])
    ids = np.array([6, 0, 3, 3, 4, 1])
    assert table.shape == NUMBERS.shape
    assert (table.rows_of(ids).words == NUMBERS[ids]).all()


def test_rows_of_packed_blocks_stay_packed() -> None:
    blocks = np.arange(5 * 34, dtype=np.uint8).reshape(5, 34)
    table = LookupTable([stored(blocks[:2], "Q8_0"), stored(blocks[2:], "Q8_0")])
    found = table.rows_of(np.array([4, 1]))
    assert table.shape == (5, 32) and found.dtype == "Q8_0" and (found.words == blocks[[4, 1]]).all()


def test_parts_are_put_in_the_order_of_their_numbers() -> None:
    parts = np.split(NUMBERS, (1, 2, 3, 4, 5, 6))
    whole = tables_in(
        **{f"a__shard_{number}__weight": stored(part) for number, part in enumerate(parts)}, b__weight=stored(NUMBERS)
    )
    assert set(whole) == {"a", "b"}
    assert (whole["a"].rows_of(np.arange(7)).words == NUMBERS).all()


@pytest.mark.skipif(sys.platform != "linux", reason="which pages are in memory is told by Linux alone")
def test_a_row_brings_its_own_pages_into_memory_and_no_others(tmp_path: Path) -> None:
    path, width = tmp_path / "table", 256
    numbers = np.random.default_rng(1).integers(0, 255, (1 << 15, width), dtype=np.uint8)
    path.write_bytes(numbers.tobytes())
    os.sync()
    forget_cached(path)
    mapped = MappedFile(path)
    table = LookupTable([mapped.tensor("U8", numbers.shape, 0)])
    if pages_in_memory(mapped):
        pytest.skip("this file system does not drop pages when asked")
    rows = np.array([5, 20_000, 5, 30_000])
    assert (table.rows_of(rows).words == numbers[rows]).all()
    assert pages_in_memory(mapped) == 3


def pages_in_memory(mapped: MappedFile) -> int:
    states = np.zeros(-(-mapped.size // mmap.PAGESIZE), np.uint8)
    library = ctypes.CDLL(None)
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert library.mincore(mapped.address, mapped.size, states.ctypes.data) == 0
    return int((states & 1).sum())


def test_damaged_tables_are_refused() -> None:
    with pytest.raises(ModelError, match=r"a\.shard_0\.weight is missing"):
        tables_in(a__shard_1__weight=stored(NUMBERS))
    with pytest.raises(ModelError, match="several formats or widths"):
        tables_in(a__shard_0__weight=stored(NUMBERS), a__shard_1__weight=stored(NUMBERS[:, :2]))
    with pytest.raises(ModelError, match="no place"):
        tables_in(a__shard_x=stored(NUMBERS))
    with pytest.raises(ModelError, match="no place"):
        tables_in(a__weight=stored(NUMBERS[0]))
    with pytest.raises(ModelError, match="single rows are not read"):
        tables_in(a__weight=StoredTensor("AFFINE4", NUMBERS, stored(NUMBERS)))
