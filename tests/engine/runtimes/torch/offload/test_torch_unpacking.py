"""Packed weights unpacked by torch: the gguf package's values to the bit, whatever the bytes are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.packed_blocks import SCALES, block_of, unpacked
from engine.models.formats.number_formats import BLOCKS
from engine.runtimes.torch.offload import torch_unpacking
from engine.runtimes.torch.offload.torch_unpacking import unpack

ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E01, 0xFFFF)
"""Scales in float16: zeros, subnormal and smallest normal numbers, the largest, infinities, and NaN."""
ODD_EXPONENTS = (0, 1, 2, 127, 253, 254, 255)


def scales_at(name: str) -> tuple[int, ...]:
    """Where the float16 numbers of a block lie."""
    return SCALES.get(name, (0,))


def same(found: torch.Tensor, wanted: np.ndarray) -> bool:
    """Equal to the bit; one NaN is like another."""
    return found.dtype == torch.float32 and np.array_equal(found.numpy(), wanted, equal_nan=True)


@pytest.mark.sampled
@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_bytes_unpack_to_the_packages_values(name: str, data: st.DataObject) -> None:
    columns, nbytes = block_of(name)
    rows, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    words = data.draw(arrays(np.uint8, (rows * blocks, nbytes)))
    for at in scales_at(name):
        odd = data.draw(st.lists(st.sampled_from(ODD_HALVES) | st.integers(0, 0xFFFF), min_size=1, max_size=4))
        words[:, at : at + 2] = np.resize(np.array(odd, "<u2"), len(words)).view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        words[:, 0] = np.resize(data.draw(st.lists(st.sampled_from(ODD_EXPONENTS), min_size=1, max_size=4)), len(words))
    words = words.reshape(rows, -1)
    found = unpack(torch.from_numpy(words), name)
    assert found.shape == (rows, blocks * columns)
    assert same(found, unpacked(name, words))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_size_of_the_pieces_and_the_dtype_do_not_change_a_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(1).integers(0, 256, (5, 3 * block_of(name)[1]), dtype=np.uint8)
    monkeypatch.setattr(torch_unpacking, "_ON_CPU", 2 * block_of(name)[0])
    # Rows of a matrix that lie in a file at an odd place.
    there = torch.zeros(words.size + 1, dtype=torch.uint8)[1:].view(words.shape).copy_(torch.from_numpy(words))
    wanted = torch.from_numpy(unpacked(name, words))
    assert same(unpack(there, name), wanted.numpy())
    rounded = unpack(there, name, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.nan_to_num(), wanted.to(torch.bfloat16).nan_to_num())
